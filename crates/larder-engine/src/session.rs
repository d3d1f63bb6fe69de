//! A sequence with the decoder and the experts that it runs on.

use larder_model::{Decoder, ExpertPath, LogitsFor, ModelError, Tap};

use crate::sequence::Sequence;
use crate::times::PhaseTimes;

/// How many tokens of a prompt are read at once unless said otherwise.
pub const PREFILL_CHUNK: usize = 256;

/// A sequence being read and written, by one that has a decoder and its experts to itself for as long.
pub struct Session<'m, P> {
    decoder: &'m Decoder,
    experts: &'m mut P,
    sequence: Sequence,
}

impl<'m, P: ExpertPath> Session<'m, P> {
    /// An empty sequence that may grow to `context` tokens, or to what the model allows if that is less.
    pub fn new(decoder: &'m Decoder, experts: &'m mut P, context: usize) -> Self {
        Session::resume(decoder, experts, Sequence::new(decoder, context))
    }

    /// Goes on with a sequence of this decoder.
    pub fn resume(decoder: &'m Decoder, experts: &'m mut P, sequence: Sequence) -> Self {
        Session { decoder, experts, sequence }
    }

    /// The sequence, for later.
    pub fn into_sequence(self) -> Sequence {
        self.sequence
    }

    /// The sequence will have `len` tokens in the end: where positions depend on that, they do from the start, however
    /// few are read at once.
    pub fn plan_len(&mut self, len: usize) {
        self.sequence.plan_len(len);
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.tokens()
    }

    /// Where the experts come from.
    pub fn experts(&self) -> &P {
        self.experts
    }

    /// The same, to be changed.
    pub fn experts_mut(&mut self) -> &mut P {
        self.experts
    }

    /// The model's resident part.
    pub fn decoder(&self) -> &'m Decoder {
        self.decoder
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.sequence.remaining()
    }

    /// Where time went so far.
    pub fn times(&self) -> PhaseTimes {
        self.sequence.times()
    }

    /// Bytes that the sequence's memory holds.
    pub fn kv_bytes(&self) -> usize {
        self.sequence.kv_bytes()
    }

    /// Tokens that need not be read again for `prompt`; see [`Sequence::common_prefix`].
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        self.sequence.common_prefix(prompt)
    }

    /// Goes back to the first `len` tokens; see [`Sequence::rewind`].
    pub fn rewind(&mut self, len: usize) -> usize {
        self.sequence.rewind(self.decoder, len)
    }

    /// Reads `tokens`, at most `chunk` at once, and returns the logits of every one or of the last one.
    ///
    /// However they are cut, the logits are those of one call. On an error nothing has been read.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        chunk: usize,
        logits_for: LogitsFor,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>, ModelError> {
        self.sequence.forward(self.decoder, self.experts, tokens, chunk, logits_for, tap)
    }
}
