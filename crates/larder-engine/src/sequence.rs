//! A sequence: its tokens, its KV cache, and the forward passes that extend both.

use larder_model::{Decoder, ExpertPath, KvCache, LogitsFor, ModelError, Tap};

use crate::times::{PhaseTimes, TimingTap};

/// Tokens and their KV cache. A sequence borrows decoder and experts only for a call, so that many sequences can take
/// turns on them; the caller guarantees that it is always the same decoder.
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
    /// An empty sequence for up to `context` tokens, or the model's context if that is less.
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

    /// Announces that the sequence will have `len` tokens. Rotary positions that depend on the length of the sequence
    /// use `len` from the start, even if the tokens are computed in chunks.
    pub fn plan_len(&mut self, len: usize) {
        self.planned = len;
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Length of the common prefix with `prompt`, whose prefill can be skipped. Never includes the prompt's last token,
    /// which must be computed for its logits.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        common_prefix_len(&self.tokens, prompt)
    }

    /// Tokens that still fit into the context.
    pub fn remaining(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Time per phase so far.
    pub fn times(&self) -> PhaseTimes {
        self.times
    }

    /// Bytes of the KV cache and recurrent state.
    pub fn kv_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Drops all tokens after the first `len`. The KV cache is truncated where the model allows it; otherwise it is
    /// dropped, and the remaining tokens are computed again by the next [`forward`](Self::forward). Returns the number
    /// of tokens that the KV cache still holds.
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

    /// Appends and computes `tokens`, at most `chunk` per pass, and returns the logits of all of them or of the last
    /// one.
    ///
    /// The chunk size does not change the logits. After an error the sequence is as before the call.
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
        // The first call usually has nothing to do. It computes all earlier tokens again if the KV cache was dropped,
        // for instance because the longer sequence changes the angles of all positions.
        let result = self
            .advance(&mut runner, before, LogitsFor::Last, &mut (), &mut Vec::new())
            .and_then(|()| self.advance(&mut runner, end, logits_for, tap, &mut logits));
        if let Err(error) = result {
            self.reset_to(decoder, before);
            return Err(error);
        }
        Ok(logits)
    }

    /// Whether the KV cache is valid for a sequence of `horizon` tokens.
    fn kv_is_valid(&self, decoder: &Decoder, horizon: usize) -> bool {
        match self.rewound {
            true => decoder.kv_valid_after_rewind(self.horizon, horizon),
            false => decoder.kv_valid_after_growth(self.horizon, horizon),
        }
    }

    /// Computes tokens up to `end`, and appends their logits.
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

    /// Drops all tokens after the first `len`, and the KV cache, which the next call computes again.
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
        Err(ModelError::Request(format!(
            "a sequence of {len} tokens does not fit into the context of {context} tokens"
        )))
    }
}

/// The decoder and experts of a call, and its chunk size.
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
    fn the_common_prefix_excludes_the_last_token_of_the_prompt() {
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
