//! A sequence in progress: what has been read, what is remembered of it, and the logits that follow.

use larder_model::{Decoder, ExpertPath, KvCache, LogitsFor, ModelError, Tap};

use crate::times::{PhaseTimes, TimingTap};

/// Tokens and what a decoder remembers of them. It holds on to neither the decoder nor the experts, so many sequences
/// can take turns on one of each; the caller guarantees that it is always the same decoder.
pub struct Sequence {
    cache: KvCache,
    tokens: Vec<u32>,
    context: usize,
    horizon: usize,
    planned: usize,
    rewound: bool,
    times: PhaseTimes,
}

impl Sequence {
    /// An empty sequence that may grow to `context` tokens, or to what the model allows if that is less.
    pub fn new(decoder: &Decoder, context: usize) -> Self {
        let context = context.min(decoder.context());
        let (tokens, times) = Default::default();
        Sequence {
            cache: decoder.new_kv_cache(context),
            tokens,
            context,
            horizon: 0,
            planned: 0,
            rewound: false,
            times,
        }
    }

    /// The sequence will have `len` tokens in the end: where positions depend on that, they do from the start, however
    /// few are read at once.
    pub fn plan_len(&mut self, len: usize) {
        self.planned = len;
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many tokens at the beginning need not be read again for `prompt`: those that both begin with, but never the
    /// last one of the prompt, which is read for its logits.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        common_prefix_len(&self.tokens, prompt)
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Where time went so far.
    pub fn times(&self) -> PhaseTimes {
        self.times
    }

    /// Bytes that the sequence's memory holds.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Goes back to the first `len` tokens, or stays if there are no more. What is remembered of them is kept where a
    /// memory can be cut there; else they are read again with the next ones. Returns how many are still remembered.
    pub fn rewind(&mut self, decoder: &Decoder, len: usize) -> usize {
        if len >= self.tokens.len() {
            return self.cache.len;
        }
        self.tokens.truncate(len);
        (self.planned, self.rewound) = (0, true);
        if !self.cache.truncate(len) {
            self.cache = decoder.new_kv_cache(self.context);
        }
        self.cache.len
    }

    /// Reads `tokens`, at most `chunk` at once, and returns the logits of every one or of the last one.
    ///
    /// However they are cut, the logits are those of one call. On an error nothing has been read.
    pub fn forward(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        tokens: &[u32],
        chunk: usize,
        logits_for: LogitsFor,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>, ModelError> {
        self.check_room(tokens.len())?;
        let before = self.tokens.len();
        let end = before + tokens.len();
        let horizon = end.max(self.planned);
        self.tokens.extend_from_slice(tokens);
        if self.cache.len > 0 && !self.kv_is_valid(decoder, horizon) {
            self.cache = decoder.new_kv_cache(self.context);
        }
        (self.horizon, self.rewound) = (horizon, false);
        let mut logits = Vec::new();
        let mut runner = Runner { decoder, experts, chunk };
        // Usually nothing lies between the two; all tokens do once a longer sequence turns its positions differently.
        let result = self
            .advance(&mut runner, before, LogitsFor::Last, &mut (), &mut Vec::new())
            .and_then(|()| self.advance(&mut runner, end, logits_for, tap, &mut logits));
        if let Err(error) = result {
            self.reset_to(decoder, before);
            return Err(error);
        }
        Ok(logits)
    }

    /// Whether what is remembered is that of a sequence of `horizon` tokens.
    fn kv_is_valid(&self, decoder: &Decoder, horizon: usize) -> bool {
        match self.rewound {
            true => decoder.kv_valid_after_rewind(self.horizon, horizon),
            false => decoder.kv_valid_after_growth(self.horizon, horizon),
        }
    }

    /// Reads on until `end`, appending logits.
    fn advance(
        &mut self,
        runner: &mut Runner,
        end: usize,
        logits_for: LogitsFor,
        tap: &mut dyn Tap,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        while self.cache.len < end {
            let part = &self.tokens[self.cache.len..end.min(self.cache.len.saturating_add(runner.chunk.max(1)))];
            let mut tap = TimingTap { times: &mut self.times, tap };
            let new =
                runner.decoder.forward(part, self.horizon, logits_for, &mut self.cache, runner.experts, &mut tap)?;
            if logits_for == LogitsFor::Last {
                logits.clear();
            }
            logits.extend_from_slice(&new);
        }
        Ok(())
    }

    /// Goes back to the first `len` tokens. Their memory is made again at the next read.
    fn reset_to(&mut self, decoder: &Decoder, len: usize) {
        self.tokens.truncate(len);
        self.cache = decoder.new_kv_cache(self.context);
        self.horizon = len;
    }

    fn check_room(&self, more: usize) -> Result<(), ModelError> {
        if more <= self.remaining() {
            return Ok(());
        }
        let (len, context) = (self.tokens.len() + more, self.context);
        Err(ModelError::Request(format!("{len} tokens do not fit the context of {context}")))
    }
}

/// What a pass runs on.
struct Runner<'a> {
    decoder: &'a Decoder,
    experts: &'a mut dyn ExpertPath,
    chunk: usize,
}

fn common_prefix_len(held: &[u32], prompt: &[u32]) -> usize {
    let most = prompt.len().saturating_sub(1);
    held.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_always_read() {
        assert_eq!(common_prefix_len(&[], &[1]), 0);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(common_prefix_len(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 2]), 1);
        assert_eq!(common_prefix_len(&[1, 2], &[1, 3, 4]), 1);
        assert_eq!(common_prefix_len(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(common_prefix_len(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!((common_prefix_len(&[1], &[]), common_prefix_len(&[1], &[1])), (0, 0));
    }
}
