//! Async steps: a device draws the token that a step yields and begins the step behind it, while the host still reads
//! logits, draws, writes text, and collects launches. The host's draw counts: a step with another token is dropped.

use larder_model::{
    AheadInput, BegunStep, BestLogits, Decoder, ExpertPath, Logits, LogitsFor, ModelError, Span, SpanImages, Tap,
    TokenOrigin, TokenPhase,
};

use super::Sequence;
use super::ahead::{AheadCounts, AheadStep};
use crate::choice::{NextChoice, NextDraws};

/// Stands for a token that is not known; any one of the vocabulary.
const UNKNOWN: [u32; 1] = [0];

impl Sequence {
    /// The text ends, with the token `last` if that is not in the sequence. If the step of the last token was begun, it
    /// becomes one of the sequence, so that recurrent states need not go back, and what follows often begins with it; a
    /// step with another token is dropped.
    pub fn end_ahead(&mut self, last: Option<u32>) {
        let begun = |token: Option<u32>| token.filter(|token| self.has_begun(*token));
        match self.pending() {
            0 if begun(last).is_some() => self.tokens.extend(last),
            1 if last.is_none() && begun(self.tokens.last().copied()).is_some() => {}
            _ => return self.drop_ahead(),
        }
        self.ahead = None;
        self.cache.len += 1;
        self.horizon = self.tokens.len().max(self.planned);
    }

    /// Computes the one pending token, if its step was begun or can be, and meanwhile begins the step behind it, if
    /// there are draws for that. `None` if its step has to be computed as others are; then nothing has changed, but for
    /// a step that was begun, which is dropped. Where a recurrent state has gone back for that, tokens before it are
    /// pending too.
    ///
    /// After an error the token is still pending.
    pub(crate) fn step_ahead(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        choice: NextChoice,
        tap: &mut dyn Tap,
    ) -> Result<Option<Logits>, ModelError> {
        let begun = self.take_begun(decoder, choice.best);
        let computed = self.cache.len - usize::from(begun.is_some());
        let (best, goes_on) = (choice.best, choice.draws.filter(|_| self.can_go_on(decoder, experts, choice.best)));
        let step = match (begun, goes_on) {
            (Some(step), _) => step,
            (None, Some(NextDraws { draws: [draw, _], changes })) if computed + 1 == self.tokens.len() => {
                let span = self.next_span(1, LogitsFor::Last);
                let input = AheadInput { after: None, best, draw, changes };
                decoder.begin_step(span, input, experts, tap).inspect_err(|_| _ = self.cache.truncate(computed))?
            }
            _ => return Ok(None),
        };
        let goes_on = goes_on.filter(|_| !step.has_waited() && decoder.can_follow(&step, experts));
        let behind = goes_on.and_then(|NextDraws { draws: [_, draw], changes }| {
            let input = AheadInput { after: Some(&step), best, draw, changes };
            // The next step meets the same error, if it is one that stays.
            self.begin_behind(decoder, experts, input, tap).ok()
        });
        // Where a step behind failed, recurrent states may have gone back further.
        let is_whole = self.cache.len > computed;
        match decoder.finish_step(step, experts, tap) {
            Ok(Some((logits, token))) if is_whole => {
                self.ahead_counts.steps += usize::from(behind.is_some());
                let best = best.map(|best| best.clone().with(token));
                self.ahead = behind.map(|step| AheadStep { step, best, token });
                Ok(Some(logits))
            }
            other => {
                self.cache.truncate(computed);
                let begun = usize::from(behind.is_some());
                self.ahead_counts += AheadCounts { steps: begun, dropped: begun };
                // More tokens may be drawn than the device returns: the step behind was begun for nothing.
                self.draws.add(matches!(other, Ok(None)));
                other.map(|_| None)
            }
        }
    }

    /// The step of the one pending token, if it was begun for a choice that reads the same logits, and can be finished;
    /// any other step that was begun is dropped.
    fn take_begun(&mut self, decoder: &Decoder, best: Option<&BestLogits>) -> Option<BegunStep> {
        let last = self.tokens.last().copied();
        let is_it = |ahead: &AheadStep| {
            Some(ahead.token) == last && ahead.best.as_ref() == best && decoder.can_finish(&ahead.step)
        };
        if let Some(ahead) = self.ahead.as_ref().filter(|_| self.pending() == 1) {
            self.draws.add(Some(ahead.token) != last);
        }
        if self.pending() != 1 || !self.ahead.as_ref().is_some_and(is_it) {
            self.drop_ahead();
            return None;
        }
        self.cache.len += 1;
        self.ahead.take().map(|ahead| ahead.step)
    }

    /// Whether a step can be begun behind the last token, before its token is known.
    fn can_go_on(&self, decoder: &Decoder, experts: &mut dyn ExpertPath, best: Option<&BestLogits>) -> bool {
        let horizon = (self.tokens.len() + 1).max(self.planned);
        let has_room = self.remaining() > 0 && self.decode_from < self.tokens.len();
        has_room
            && self.draws.are_good()
            && decoder.runs_ahead(best)
            && self.kv_is_valid(decoder, horizon)
            // Experts of a token that does not become part of the text are computed as well.
            && experts.may_compute_drafts()
    }

    /// Begins the step behind all tokens, whose rows do not count in the KV cache.
    fn begin_behind(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        input: AheadInput,
        tap: &mut dyn Tap,
    ) -> Result<BegunStep, ModelError> {
        let len = self.cache.len;
        let span = Span {
            tokens: &UNKNOWN,
            images: SpanImages { placed: self.images.placed(), first: len },
            before: &self.tokens,
            cache: &mut self.cache,
            horizon: (self.tokens.len() + 1).max(self.planned),
            logits_for: LogitsFor::Last,
            origin: TokenOrigin { sequence: self.number, phase: TokenPhase::Decode },
            hidden: None,
        };
        let begun = decoder.begin_step(span, input, experts, tap);
        if begun.is_ok() {
            self.cache.len = len
        } else {
            _ = self.cache.truncate(len)
        }
        begun
    }
}
