//! The steps of decoding: each computes the token that was written last, and the tokens that are drafted to follow it.

use std::ops::Range;
use std::time::{Duration, Instant};

use larder_model::{BestLogits, Decoder, ExpertPath, Logits, LogitsFor, LogitsRow, ModelError, Tap, TokenPhase};

use super::session::Session;
use super::writer::{Writer, WrittenToken};
use crate::choice::{NextChoice, NextDraws, TokenChoice};
use crate::output_loss::OutputLoss;
use crate::sampler::SamplerError;
use crate::sequence::{AppendedTokens, Sequence, Unobserved};
use crate::speculation::{DraftCounts, DraftedStep, Drafting, Speculator, TextSoFar};
use crate::times::PhaseTimes;

/// A finished step: the prefill of the prompt, or the decode of one token and of those drafted behind it.
#[derive(Clone, Copy, Debug)]
pub struct StepStats {
    /// Tokens computed in the step, without rejected tokens.
    pub tokens: usize,
    /// Wall-clock time of the step, with the drafting.
    pub time: Duration,
    /// Time per phase.
    pub times: PhaseTimes,
    /// The loss of its output, if that was measured.
    pub loss: OutputLoss,
}

/// The decoding of one text, between steps of its sequence.
pub struct Decoding {
    speculator: Speculator,
    /// The logits of the last step, and the draft tokens that it computed.
    step: DraftedStep,
    /// Draft tokens that the next step computes: the last ones of the sequence.
    drafts: Vec<u32>,
    /// Whether the step of the token that was written last is an async step, and whether the one behind it may be.
    begun: bool,
    goes_on: bool,
    /// The token that was written last, if it is not in the sequence.
    last: Option<u32>,
    /// When the logits of the last step were there.
    arrived: Instant,
    /// How long the drafting before the step took.
    draft_time: Duration,
    /// How long step and drafting took, if that is known.
    step_time: Option<Duration>,
}

impl Decoding {
    /// A text whose tokens are drafted as `drafting` says.
    pub fn new(drafting: &Drafting) -> Self {
        Decoding {
            speculator: Speculator::new(drafting),
            step: DraftedStep::default(),
            drafts: Vec::new(),
            begun: false,
            goes_on: false,
            last: None,
            arrived: Instant::now(),
            draft_time: Duration::ZERO,
            step_time: None,
        }
    }

    /// The tokens of the sequence that are confirmed: all but draft tokens.
    pub fn confirmed<'s>(&self, sequence: &'s Sequence) -> &'s [u32] {
        let tokens = sequence.tokens();
        &tokens[..tokens.len() - self.drafts.len() - self.step.open()]
    }

    /// Draft tokens that the next step computes.
    pub fn drafts(&self) -> usize {
        self.drafts.len()
    }

    /// All draft tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.speculator.counts()
    }

    /// The logits behind the last token that is confirmed.
    pub fn logits(&mut self) -> LogitsRow<'_> {
        self.step.row()
    }

    /// Writes the token behind the last one that is confirmed.
    pub fn write(&mut self, sequence: &Sequence, writer: &mut Writer) -> Result<WrittenToken, SamplerError> {
        let (tokens, room) = (self.confirmed(sequence), sequence.remaining() + self.step.open());
        let written = writer.write(self.step.row(), tokens, room)?;
        self.last = Some(written.id);
        Ok(written)
    }

    /// Takes note of the token that was written. Returns whether it was drafted, so that the next one can be written.
    pub fn confirm(&mut self, id: u32) -> bool {
        self.step.confirm(id)
    }

    /// Ends the step: drops the draft tokens that are not confirmed. Returns how many were, and how long the step took,
    /// if that is known.
    pub fn settle(&mut self, sequence: &mut Sequence) -> (usize, Option<Duration>) {
        let start = Instant::now();
        let (drafts, accepted) = (self.step.drafts(), self.step.accepted());
        sequence.rewind(self.confirmed(sequence).len());
        self.step = DraftedStep::default();
        let time = self.step_time.take().map(|time| time + start.elapsed());
        time.iter().for_each(|time| self.speculator.stepped(drafts, accepted, *time));
        (accepted, time)
    }

    /// Appends the token `id`, and at most `most` that are drafted to follow it, for a `choice` of the next ones.
    pub fn append(
        &mut self,
        sequence: &mut Sequence,
        (decoder, experts): (&Decoder, &mut dyn ExpertPath),
        (id, most): (u32, usize),
        choice: &mut dyn TokenChoice,
        tap: &mut dyn Tap,
    ) -> Result<(), ModelError> {
        let room = if sequence.pending() == 0 { sequence.draft_room(decoder, most) } else { 0 };
        let start = Instant::now();
        (self.last, self.begun) = (None, sequence.has_begun(id));
        let (before, own) = sequence.drafting(decoder, experts);
        let text = TextSoFar { before, last: id };
        let (mut drafts, could_draft) = if self.begun {
            (Vec::new(), self.speculator.could_draft(text, room, own))
        } else {
            (self.speculator.draft(text, room, own, &mut Unobserved(tap))?, false)
        };
        choice.cut(&mut drafts);
        self.goes_on = drafts.is_empty() && !could_draft && decoder.may_run_ahead();
        self.draft_time = start.elapsed();
        sequence.append(decoder, &[&[id], &drafts[..]].concat(), TokenPhase::Decode)?;
        self.drafts = drafts;
        Ok(())
    }

    /// What a `choice` reads of the logits of all pending tokens, and its draws, if the step behind them may begin
    /// before its token is known.
    pub fn wants(
        &self,
        sequence: &Sequence,
        decoder: &Decoder,
        choice: &mut dyn TokenChoice,
    ) -> (Option<BestLogits>, Option<NextDraws>) {
        let tokens = [sequence.tokens()];
        let best = if decoder.finds_best() { choice.best(&tokens) } else { None };
        let draws = if self.goes_on { choice.draws(&tokens) } else { None };
        (best, draws)
    }

    /// Takes the logits of a step, which took so long, if that is known.
    pub fn computed(&mut self, logits: Logits, took: Option<Duration>) {
        // A step that was begun has taken its time since the logits before it were there.
        let begun = std::mem::take(&mut self.begun);
        self.step_time = took.map(|took| if begun { self.arrived.elapsed() } else { self.draft_time + took });
        self.step = DraftedStep::new(logits, std::mem::take(&mut self.drafts));
        self.arrived = Instant::now();
    }

    /// Drops the tokens that are not confirmed, and the logits.
    pub fn drop_drafts(&mut self, sequence: &mut Sequence) {
        sequence.rewind(self.confirmed(sequence).len());
        sequence.drop_ahead();
        self.drafts.clear();
        (self.step, self.begun) = (DraftedStep::default(), false);
    }

    /// Takes note that older tokens were dropped from the sequence.
    pub fn shifted(&mut self) {
        self.speculator.shifted();
    }

    /// Ends the text: the sequence keeps the step of the token that was written last, if it was begun, and drops any
    /// other.
    pub fn end(&mut self, sequence: &mut Sequence) {
        sequence.rewind(self.confirmed(sequence).len());
        sequence.end_ahead(self.last);
    }
}

/// The decoding of one text by a session, whose steps it makes.
pub struct SessionDecoding<'a, 'm, P: ExpertPath> {
    /// The session, whose last tokens may be draft tokens that are not confirmed.
    pub session: &'a mut Session<'m, P>,
    decoding: Decoding,
    /// Of the step, if it is not settled.
    stats: Option<StepStats>,
}

impl<'a, 'm, P: ExpertPath> SessionDecoding<'a, 'm, P> {
    /// Decoding behind a prompt with these logits.
    pub fn new(session: &'a mut Session<'m, P>, logits: Logits, drafting: &Drafting) -> Self {
        let mut decoding = Decoding::new(drafting);
        decoding.computed(logits, None);
        SessionDecoding { session, decoding, stats: None }
    }

    /// As [`Decoding::write`].
    pub fn write(&mut self, writer: &mut Writer) -> Result<WrittenToken, SamplerError> {
        self.decoding.write(self.session.sequence(), writer)
    }

    /// As [`Decoding::logits`].
    pub fn logits(&mut self) -> LogitsRow<'_> {
        self.decoding.logits()
    }

    /// As [`Decoding::confirm`].
    pub fn confirm(&mut self, id: u32) -> bool {
        self.decoding.confirm(id)
    }

    /// As [`Decoding::draft_counts`].
    pub fn draft_counts(&self) -> DraftCounts {
        self.decoding.draft_counts()
    }

    /// Ends the step. Returns what it took; `None` if that is known already.
    pub fn settle(&mut self) -> Option<StepStats> {
        let (accepted, time) = self.decoding.settle(self.session.parts().2);
        let stats = self.stats.take()?;
        Some(StepStats { tokens: 1 + accepted, time: time.unwrap_or_default(), ..stats })
    }

    /// Drops older tokens of a full context; see [`Sequence::shift`]. Returns which.
    pub fn shift(&mut self, keep: usize) -> Result<Option<Range<usize>>, ModelError> {
        let dropped = self.session.shift(keep)?;
        dropped.iter().for_each(|_| self.decoding.shifted());
        Ok(dropped)
    }

    /// Computes the token `id` and what is drafted to follow it, in a text of at most `room` more tokens, for a choice
    /// of the next ones.
    pub fn next(
        &mut self,
        id: u32,
        room: usize,
        choice: &mut dyn TokenChoice,
        tap: &mut dyn Tap,
    ) -> Result<(), ModelError> {
        let (times, loss) = (self.session.times(), self.session.output_loss());
        let (decoder, experts, sequence) = self.session.parts();
        let from = sequence.tokens().len();
        self.decoding.append(sequence, (decoder, experts), (id, room), choice, tap)?;
        let (best, draws) = self.decoding.wants(sequence, decoder, choice);
        let (best, draws) = (best.as_ref(), draws.as_ref().filter(|_| room > 0));
        let (start, tokens) = (Instant::now(), AppendedTokens { from, logits_for: LogitsFor::All, chunk: None });
        let logits = self.session.compute(tokens, NextChoice { best, draws }, tap);
        let logits = logits.inspect_err(|_| self.decoding.drafts.clear())?;
        self.decoding.computed(logits, Some(start.elapsed()));
        let (times, loss) = (self.session.times() - times, self.session.output_loss() - loss);
        self.stats = Some(StepStats { tokens: 1, time: Duration::ZERO, times, loss });
        Ok(())
    }
}

impl<P: ExpertPath> Drop for SessionDecoding<'_, '_, P> {
    fn drop(&mut self) {
        self.decoding.end(self.session.parts().2);
    }
}
