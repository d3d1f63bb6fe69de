//! Memory of the activations of a step.

/// Memory of a step's activations, beside what the step appends to KV caches.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StepMemory {
    /// Bytes per token of the step.
    pub bytes_per_token: usize,
    /// Bytes whatever the number of tokens.
    pub fixed_bytes: usize,
}

impl StepMemory {
    /// Bytes of a step of `tokens` tokens.
    pub fn bytes(&self, tokens: usize) -> u64 {
        (self.bytes_per_token as u64).saturating_mul(tokens as u64).saturating_add(self.fixed_bytes as u64)
    }

    /// The most tokens of a step that takes at most `bytes` bytes.
    pub fn tokens_in(&self, bytes: u64) -> usize {
        let tokens = bytes.saturating_sub(self.fixed_bytes as u64) / self.bytes_per_token.max(1) as u64;
        usize::try_from(tokens).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_inverse_of_bytes() {
        let memory = StepMemory { bytes_per_token: 7, fixed_bytes: 100 };
        assert_eq!((memory.bytes(3), memory.bytes(usize::MAX)), (121, u64::MAX));
        assert_eq!([99, 100, 106, 107, 121].map(|bytes| memory.tokens_in(bytes)), [0, 0, 0, 1, 3]);
        assert_eq!(StepMemory::default().tokens_in(5), 5);
    }
}
