//! Computing what was appended to one sequence, in chunks.

use larder_model::{Decoder, ExpertPath, Logits, LogitsFor, ModelError, Tap};

use super::Sequence;
use super::step::{StepPart, Unobserved, step};
use super::token_input::TokenInput;
use crate::choice::NextChoice;
use crate::times::ChunkTap;

/// Tokens at the end of a sequence that were appended to be computed.
#[derive(Clone, Copy)]
pub(crate) struct AppendedTokens {
    /// Index of the first.
    pub from: usize,
    /// The tokens whose logits are returned.
    pub logits_for: LogitsFor,
    /// Tokens that are computed in one step; `None` as for a prompt.
    pub chunk: Option<usize>,
}

impl Sequence {
    /// Appends and computes `input`, and returns the logits it asks for.
    ///
    /// After an error the sequence is as before the call.
    pub fn forward(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        input: &TokenInput,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>, ModelError> {
        self.append(decoder, input.tokens, input.phase)?;
        let from = self.tokens.len() - input.tokens.len();
        let tokens = AppendedTokens { from, logits_for: input.logits_for, chunk: input.chunk };
        self.compute_appended(decoder, experts, tokens, NextChoice::default(), tap).map(Logits::into_all)
    }

    /// Computes what was appended last, and returns the logits of it that are asked for, or those that the `choice`
    /// behind it reads.
    ///
    /// After an error the sequence is as before the append.
    pub(crate) fn compute_appended(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        tokens: AppendedTokens,
        choice: NextChoice,
        tap: &mut dyn Tap,
    ) -> Result<Logits, ModelError> {
        let mut logits = Logits::default();
        while self.pending() > 0 {
            let choice = if logits.is_empty() { choice } else { NextChoice::default() };
            let result = self.compute_next(decoder, experts, tokens, choice, tap);
            let new = result.inspect_err(|_| _ = self.rewind(tokens.from))?;
            logits = if logits.is_empty() { new } else { [logits.into_all(), new.into_all()].concat().into() };
        }
        Ok(logits)
    }

    /// Computes one chunk of pending tokens. Those before the appended `tokens`, which are pending again, are not
    /// observed and have no logits. The logits that the `choice` reads are enough if it is the last chunk.
    fn compute_next(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        tokens: AppendedTokens,
        choice: NextChoice,
        tap: &mut dyn Tap,
    ) -> Result<Logits, ModelError> {
        let (mut times, chunk) = (self.times, tokens.chunk.unwrap_or(self.prefill_tokens).max(1));
        let again = tokens.from.saturating_sub(self.cache.len);
        let mut unobserved = Unobserved(&mut *tap);
        let (most, logits_for, tap): (_, _, &mut dyn Tap) = match again {
            0 => (chunk, tokens.logits_for, tap),
            _ => (chunk.min(again), LogitsFor::None, &mut unobserved),
        };
        let (before, total) = (self.cache.len.saturating_sub(tokens.from), self.tokens.len() - tokens.from);
        let mut tap = ChunkTap { times: &mut times, tap, before, tokens: self.next_tokens(most), total };
        let choice = if self.next_tokens(most) == self.pending() { choice } else { NextChoice::default() };
        let (best, draws) = (choice.best.cloned(), choice.draws.cloned());
        let part = StepPart { sequence: self, most, logits_for, best, draws };
        let mut logits = step(decoder, experts, &mut [part], &mut tap)?;
        self.times = times;
        Ok(logits.pop().unwrap_or_default())
    }
}
