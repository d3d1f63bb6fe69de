//! The steps of decoding: each computes the token that was written last, and the tokens that are drafted to follow it.

use std::time::{Duration, Instant};

use larder_model::{BestLogits, ExpertPath, Logits, LogitsRow, ModelError, Tap, TokenDraw};

use crate::output_loss::OutputLoss;
use crate::run_ahead::{AheadChoice, AheadCounts, AheadStep};
use crate::sampler::SamplerError;
use crate::sequence::Unobserved;
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

    /// What it draws the next token by, or the one `behind` that; `None` if a device cannot do it.
    fn draw(&self, behind: usize) -> Option<TokenDraw> {
        let _ = behind;
        None
    }
}

/// The decoding of one text.
pub struct Decoding<'a, 'm, P: ExpertPath> {
    /// The sequence, whose last tokens may be draft tokens that are not confirmed.
    pub session: &'a mut Session<'m, P>,
    speculator: Speculator,
    step: DraftedStep,
    /// Of the step, if it is not settled.
    stats: Option<StepStats>,
    /// The step of the next token, if it was begun already: its token is the last of the sequence.
    ahead: Option<AheadStep>,
    ahead_counts: AheadCounts,
    /// When the logits of the last step were there.
    arrived: Instant,
}

impl<'a, 'm, P: ExpertPath> Decoding<'a, 'm, P> {
    /// Decoding behind a prompt with these logits.
    pub fn new(session: &'a mut Session<'m, P>, logits: Logits, drafting: &Drafting) -> Self {
        let step = DraftedStep::new(logits, Vec::new());
        let (speculator, arrived) = (Speculator::new(drafting), Instant::now());
        Decoding { session, speculator, step, stats: None, ahead: None, ahead_counts: AheadCounts::default(), arrived }
    }

    /// Writes the token behind the last one that is confirmed.
    pub fn write(&mut self, writer: &mut Writer) -> Result<WrittenToken, SamplerError> {
        let open = self.step.open() + usize::from(self.ahead.is_some());
        let (tokens, room) = (self.session.tokens(), self.session.remaining());
        writer.write(self.step.row(), &tokens[..tokens.len() - open], room + open)
    }

    /// The text ends: no further step is wanted.
    pub fn end(&mut self) {
        self.drop_ahead();
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
        if self.step.open() > 0 {
            self.session.rewind(self.session.tokens().len() - self.step.open());
        }
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
        if self.next_ahead(id, room, choice, tap)? {
            return Ok(());
        }
        let start = Instant::now();
        let room = self.session.sequence().draft_room(self.session.decoder(), room);
        let (before, own) = self.session.drafting();
        let text = TextSoFar { before, last: id };
        let mut drafts = self.speculator.draft(text, room, own, &mut Unobserved(&mut *tap))?;
        choice.cut(&mut drafts);
        let drafting = start.elapsed();
        let tokens = [&[id], &drafts[..]].concat();
        let best = choice.best(&[self.session.tokens(), &tokens]);
        let input = TokenInput::decode(&tokens).all_logits();
        let (logits, mut stats) = forward(self.session, &input, best.as_ref(), tap);
        stats.time += drafting;
        (self.step, self.stats) = (DraftedStep::new(logits?, drafts), Some(stats));
        self.arrived = Instant::now();
        Ok(())
    }

    /// Computes the token `id`, and begins the step behind it before the token of that is known, where such steps run ahead and nothing is
    /// drafted. False if it has done nothing.
    fn next_ahead(
        &mut self,
        id: u32,
        room: usize,
        choice: &mut dyn TokenChoice,
        tap: &mut dyn Tap,
    ) -> Result<bool, ModelError> {
        let (start, times, loss) = (Instant::now(), self.session.times(), self.session.output_loss());
        let begun = self.ahead.take();
        let start = if begun.is_some() { self.arrived } else { start };
        let before = self.session.tokens();
        let before = &before[..before.len() - usize::from(begun.is_some())];
        let Some(ahead) = AheadChoice::of(choice, &[before, &[id]]) else {
            self.ahead = begun;
            self.drop_ahead();
            return Ok(false);
        };
        if begun.is_none() && !self.session.runs_ahead(ahead.best()) {
            return Ok(false);
        }
        let (before, own) = self.session.drafting();
        let before = &before[..before.len() - usize::from(begun.is_some())];
        let goes_on = room > 0 && !self.speculator.could_draft(TextSoFar { before, last: id }, own);
        self.ahead_counts.dropped += usize::from(begun.as_ref().is_some_and(|begun| !begun.has_token(id)));
        let Some((logits, behind)) = self.session.step_ahead(id, begun, &ahead, goes_on, tap)? else {
            return Ok(false);
        };
        self.ahead_counts.steps += usize::from(behind.is_some());
        self.arrived = Instant::now();
        let (times, loss) = (self.session.times() - times, self.session.output_loss() - loss);
        self.stats = Some(StepStats { tokens: 1, time: self.arrived - start, times, loss });
        (self.step, self.ahead) = (DraftedStep::new(logits, Vec::new()), behind);
        Ok(true)
    }

    /// All draft tokens so far.
    pub fn draft_counts(&self) -> DraftCounts {
        self.speculator.counts()
    }

    /// All steps so far that ran ahead.
    pub fn ahead_counts(&self) -> AheadCounts {
        self.ahead_counts
    }

    /// Drops the step of a token that is not known, if it was begun.
    fn drop_ahead(&mut self) {
        if self.ahead.take().is_some() {
            self.session.drop_ahead();
            self.ahead_counts.dropped += 1;
        }
    }
}

/// A step that was begun is dropped, so that the sequence ends with the last token that was computed.
impl<P: ExpertPath> Drop for Decoding<'_, '_, P> {
    fn drop(&mut self) {
        self.drop_ahead();
    }
}

/// Computes `input`, of whose logits the `best` may be enough, and how long that took.
pub(crate) fn forward<P: ExpertPath>(
    session: &mut Session<P>,
    input: &TokenInput,
    best: Option<&BestLogits>,
    tap: &mut dyn Tap,
) -> (Result<Logits, ModelError>, StepStats) {
    let (start, before, loss) = (Instant::now(), session.times(), session.output_loss());
    let logits = session.forward_best(input, best, tap);
    let (times, loss) = (session.times() - before, session.output_loss() - loss);
    (logits, StepStats { tokens: input.tokens.len(), time: start.elapsed(), times, loss })
}
