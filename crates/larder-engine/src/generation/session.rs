//! A sequence together with its decoder and expert path.

use std::ops::Range;

use larder_model::{BestLogits, Decoder, ExpertPath, Logits, ModelError, Tap};

use crate::choice::NextChoice;
use crate::images::Picture;
use crate::output_loss::{LossMeter, OutputLoss};
use crate::sequence::{AppendedTokens, Sequence, TokenInput};
use crate::times::PhaseTimes;

/// A sequence with exclusive use of a decoder and an expert path.
pub struct Session<'m, P> {
    decoder: &'m Decoder,
    experts: &'m mut P,
    sequence: Sequence,
    meter: Option<LossMeter>,
}

impl<'m, P: ExpertPath> Session<'m, P> {
    /// A session with an empty sequence for up to `context` tokens, or the model's context if that is less.
    pub fn new(decoder: &'m Decoder, experts: &'m mut P, context: usize) -> Self {
        Session::resume(decoder, experts, Sequence::new(decoder, context))
    }

    /// A session that continues a sequence of the same decoder.
    pub fn resume(decoder: &'m Decoder, experts: &'m mut P, sequence: Sequence) -> Self {
        Session { decoder, experts, sequence, meter: None }
    }

    /// Ends the session and returns its sequence, for [`resume`](Self::resume).
    pub fn into_sequence(self) -> Sequence {
        self.sequence
    }

    /// The same session, of whose prompts at most `tokens` tokens are computed in one step; see
    /// [`Sequence::with_prefill_tokens`].
    pub fn with_prefill_tokens(self, tokens: usize) -> Self {
        Session { sequence: self.sequence.with_prefill_tokens(tokens), ..self }
    }

    /// Tokens of a prompt that are computed in one step.
    pub fn prefill_tokens(&self) -> usize {
        self.sequence.prefill_tokens()
    }

    /// The same session, of whose decoded tokens `meter` measures the loss.
    pub fn with_meter(self, meter: LossMeter) -> Self {
        Session { meter: Some(meter), ..self }
    }

    /// Losses of outputs that were measured so far.
    pub fn output_loss(&self) -> OutputLoss {
        self.meter.as_ref().map(LossMeter::loss).unwrap_or_default()
    }

    /// Announces the final length of the sequence; see [`Sequence::plan_len`].
    pub fn plan_len(&mut self, len: usize) {
        self.sequence.plan_len(len);
    }

    /// The sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.tokens()
    }

    /// The expert path.
    pub fn experts(&self) -> &P {
        self.experts
    }

    /// The expert path, mutable.
    pub fn experts_mut(&mut self) -> &mut P {
        self.experts
    }

    /// The decoder.
    pub fn decoder(&self) -> &'m Decoder {
        self.decoder
    }

    /// Tokens that still fit into the context.
    pub fn remaining(&self) -> usize {
        self.sequence.remaining()
    }

    /// Time per phase so far.
    pub fn times(&self) -> PhaseTimes {
        self.sequence.times()
    }

    /// Bytes of the KV cache and recurrent state.
    pub fn kv_bytes(&self) -> usize {
        self.sequence.kv_bytes()
    }

    /// Length of the common prefix with `prompt`; see [`Sequence::common_prefix`].
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        self.sequence.common_prefix(prompt)
    }

    /// Drops all tokens after the first `len`; see [`Sequence::rewind`].
    pub fn rewind(&mut self, len: usize) -> usize {
        self.sequence.rewind(len)
    }

    /// Decoder, expert path and sequence.
    pub(crate) fn parts(&mut self) -> (&'m Decoder, &mut P, &mut Sequence) {
        (self.decoder, self.experts, &mut self.sequence)
    }

    /// Takes the pictures of the next prompt; see [`Sequence::show`].
    pub fn show(&mut self, pictures: &[Picture]) {
        self.sequence.show(pictures);
    }

    /// Drops the older half of the tokens behind the first `keep`; see [`Sequence::shift`].
    pub fn shift(&mut self, keep: usize) -> Result<Option<Range<usize>>, ModelError> {
        self.sequence.shift(self.decoder, keep)
    }

    /// Appends tokens that are not computed; see [`Sequence::append_made_up`].
    pub fn append_made_up(&mut self, tokens: &[u32], seed: u64) -> Result<(), ModelError> {
        self.sequence.append_made_up(self.decoder, tokens, seed)
    }

    /// Appends and computes `input`, and returns the logits it asks for; see [`Sequence::forward`].
    pub fn forward(&mut self, input: &TokenInput, tap: &mut dyn Tap) -> Result<Vec<f32>, ModelError> {
        self.forward_for(input, NextChoice::default(), tap).map(Logits::into_all)
    }

    /// As [`forward`](Self::forward), for a choice that reads `best` of each row alone.
    pub fn forward_best(
        &mut self,
        input: &TokenInput,
        best: Option<&BestLogits>,
        tap: &mut dyn Tap,
    ) -> Result<Logits, ModelError> {
        self.forward_for(input, NextChoice { best, draws: None }, tap)
    }

    /// As [`forward`](Self::forward), for a choice that may read a part of the logits.
    pub(crate) fn forward_for(
        &mut self,
        input: &TokenInput,
        choice: NextChoice,
        tap: &mut dyn Tap,
    ) -> Result<Logits, ModelError> {
        self.sequence.append(self.decoder, input.tokens, input.phase)?;
        let from = self.sequence.tokens().len() - input.tokens.len();
        self.compute(AppendedTokens { from, logits_for: input.logits_for, chunk: input.chunk }, choice, tap)
    }

    /// Computes what was appended last, and returns the logits of it that are asked for.
    pub(crate) fn compute(
        &mut self,
        tokens: AppendedTokens,
        choice: NextChoice,
        tap: &mut dyn Tap,
    ) -> Result<Logits, ModelError> {
        let Session { decoder, experts, sequence, meter } = self;
        // More than a token is pending where its position changes those of all others.
        let is_token = sequence.pending() == 1 && !sequence.is_prompt(tokens.from);
        let meter = meter.as_ref().filter(|_| is_token);
        let exact = meter.and_then(|meter| meter.before_token(decoder, *experts, sequence));
        let choice = if exact.is_none() { choice } else { NextChoice::default() };
        let logits = sequence.compute_appended(decoder, *experts, tokens, choice, tap)?;
        if let (Some(exact), Some(meter), Logits::All(own)) = (exact, meter, &logits) {
            meter.compare(&exact, own, *experts);
        }
        Ok(logits)
    }
}
