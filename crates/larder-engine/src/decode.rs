//! The steps of decoding: each computes the token that was written last, and the tokens that are drafted to follow it.

use std::time::{Duration, Instant};

use larder_model::{BestLogits, ExpertPath, LogitChanges, Logits, LogitsRow, ModelError, Tap, TokenDraw};

use crate::output_loss::OutputLoss;
use crate::sampler::SamplerError;
use crate::sequence::{NextChoice, Unobserved};
use crate::session::Session;
use crate::speculation::{DraftCounts, DraftedStep, Drafting, Speculator, TextSoFar};
use crate::times::PhaseTimes;
use crate::token_input::TokenInput;
use crate::writer::{Writer, WrittenToken};

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

/// The choice of tokens from logits.
pub trait TokenChoice {
    /// Takes those draft tokens off that cannot follow.
    fn cut(&mut self, drafts: &mut Vec<u32>) {
        let _ = drafts;
    }

    /// The logits that it reads of the last tokens of a sequence, whose tokens are these parts; `None` for all.
    fn best(&mut self, tokens: &[&[u32]]) -> Option<BestLogits>;

    /// The draws of the next token of a sequence, whose tokens are these parts, and of the one behind it; `None` if a device cannot draw as this
    /// choice does.
    fn draws(&mut self, tokens: &[&[u32]]) -> Option<NextDraws> {
        let _ = tokens;
        None
    }
}

/// The draws of the next two tokens of a sequence.
#[derive(Clone, Debug)]
pub struct NextDraws {
    /// One for each of them.
    pub draws: [TokenDraw; 2],
    /// How the choice changes logits before the first of them.
    pub changes: LogitChanges,
}

/// The decoding of one text.
pub struct Decoding<'a, 'm, P: ExpertPath> {
    /// The sequence, whose last tokens may be draft tokens that are not confirmed.
    pub session: &'a mut Session<'m, P>,
    speculator: Speculator,
    step: DraftedStep,
    /// Of the step, if it is not settled.
    stats: Option<StepStats>,
    /// When the logits of the last step were there.
    arrived: Instant,
    /// The token that was written last, if it is not in the sequence.
    last: Option<u32>,
}

impl<'a, 'm, P: ExpertPath> Decoding<'a, 'm, P> {
    /// Decoding behind a prompt with these logits.
    pub fn new(session: &'a mut Session<'m, P>, logits: Logits, drafting: &Drafting) -> Self {
        let step = DraftedStep::new(logits, Vec::new());
        Decoding {
            session,
            speculator: Speculator::new(drafting),
            step,
            stats: None,
            arrived: Instant::now(),
            last: None,
        }
    }

    /// Writes the token behind the last one that is confirmed.
    pub fn write(&mut self, writer: &mut Writer) -> Result<WrittenToken, SamplerError> {
        let (tokens, room, open) = (self.session.tokens(), self.session.remaining(), self.step.open());
        let written = writer.write(self.step.row(), &tokens[..tokens.len() - open], room + open)?;
        self.last = Some(written.id);
        Ok(written)
    }

    /// The logits behind the last token that is confirmed.
    pub fn logits(&mut self) -> LogitsRow<'_> {
        self.step.row()
    }

    /// Takes note of the token that was written. Returns whether it was drafted, so that the next one can be written.
    pub fn confirm(&mut self, id: u32) -> bool {
        self.step.confirm(id)
    }

    /// Ends the step: drops the draft tokens that are not confirmed. Returns what it took; `None` if that is known already.
    pub fn settle(&mut self) -> Option<StepStats> {
        let start = Instant::now();
        let (drafts, accepted) = (self.step.drafts(), self.step.accepted());
        self.session.rewind(self.session.tokens().len() - self.step.open());
        self.step = DraftedStep::default();
        let mut stats = self.stats.take()?;
        stats.tokens = 1 + accepted;
        stats.time += start.elapsed();
        self.speculator.stepped(drafts, accepted, stats.time);
        Some(stats)
    }

    /// Takes note that older tokens were dropped from the sequence.
    pub fn shifted(&mut self) {
        self.speculator.shifted();
    }

    /// Computes the token `id` and what is drafted to follow it, in a text of at most `room` more tokens, for a choice of the next ones.
    pub fn next(
        &mut self,
        id: u32,
        room: usize,
        choice: &mut dyn TokenChoice,
        tap: &mut dyn Tap,
    ) -> Result<(), ModelError> {
        self.last = None;
        let begun = self.session.sequence().has_begun(id);
        // A step that was begun has taken its time since the logits before it were there.
        let start = if begun { self.arrived } else { Instant::now() };
        let (drafts, goes_on) = self.draft(id, begun, room, choice, tap)?;
        let (drafting, tokens) = (start.elapsed(), [&[id], &drafts[..]].concat());
        let finds_best = self.session.decoder().finds_best();
        let best = if finds_best { choice.best(&[self.session.tokens(), &tokens]) } else { None };
        let goes_on = goes_on && room > 0 && self.session.decoder().runs_ahead(best.as_ref());
        let draws = if goes_on { choice.draws(&[self.session.tokens(), &tokens]) } else { None };
        let input = TokenInput::decode(&tokens).all_logits();
        let (best, draws) = (best.as_ref(), draws.as_ref());
        let (logits, mut stats) = forward(self.session, &input, NextChoice { best, draws }, tap);
        stats.time += drafting;
        (self.step, self.stats) = (DraftedStep::new(logits?, drafts), Some(stats));
        self.arrived = Instant::now();
        Ok(())
    }

    /// The draft tokens behind the token `id`, and whether the step behind it may begin before its token is known, because there are none. A
    /// step that was `begun` has none either.
    fn draft(
        &mut self,
        id: u32,
        begun: bool,
        room: usize,
        choice: &mut dyn TokenChoice,
        tap: &mut dyn Tap,
    ) -> Result<(Vec<u32>, bool), ModelError> {
        let room = self.session.sequence().draft_room(self.session.decoder(), room);
        let (before, own) = self.session.drafting();
        let text = TextSoFar { before, last: id };
        if begun {
            return Ok((Vec::new(), !self.speculator.could_draft(text, room, own)));
        }
        let mut drafts = self.speculator.draft(text, room, own, &mut Unobserved(&mut *tap))?;
        choice.cut(&mut drafts);
        let goes_on = drafts.is_empty();
        Ok((drafts, goes_on))
    }

    /// All draft tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.speculator.counts()
    }
}

/// The sequence keeps the step of the token that was written last, if it was begun, and drops any other.
impl<P: ExpertPath> Drop for Decoding<'_, '_, P> {
    fn drop(&mut self) {
        self.session.end_ahead(self.last);
    }
}

/// Computes `input`, of whose logits the `choice` may read a part, and how long that took.
pub(crate) fn forward<P: ExpertPath>(
    session: &mut Session<P>,
    input: &TokenInput,
    choice: NextChoice,
    tap: &mut dyn Tap,
) -> (Result<Logits, ModelError>, StepStats) {
    let (start, before, loss) = (Instant::now(), session.times(), session.output_loss());
    let logits = session.forward_for(input, choice, tap);
    let (times, loss) = (session.times() - before, session.output_loss() - loss);
    (logits, StepStats { tokens: input.tokens.len(), time: start.elapsed(), times, loss })
}
