//! Prefix cache: sequences of earlier requests, whose KV caches serve prompts with the same beginning.

use larder_engine::Sequence;
use larder_model::Decoder;

/// A fixed number of sequences. The idle ones keep their KV caches until another request needs the place.
pub struct PrefixCache {
    /// Sequences of no active request, least recently used first.
    idle: Vec<Sequence>,
    /// Sequences that may still be allocated.
    unallocated: usize,
    context: usize,
}

impl PrefixCache {
    /// Holds up to `count` sequences of `context` tokens, allocated when first needed.
    pub fn new(count: usize, context: usize) -> Self {
        PrefixCache { idle: Vec::new(), unallocated: count, context }
    }

    /// A sequence for `prompt`: the one with the longest common prefix if that is worth reusing, else a new one, else the
    /// least recently used one. It is truncated to the common prefix, which is always shorter than the prompt; what the KV cache
    /// could not keep of it is pending. The caller guarantees that fewer than `count` sequences are taken.
    pub fn take(&mut self, prompt: &[u32], decoder: &Decoder) -> Sequence {
        let shared: Vec<usize> = self.idle.iter().map(|sequence| sequence.common_prefix(prompt)).collect();
        let best = (0..self.idle.len()).max_by_key(|i| shared[*i]);
        let mut sequence = match best {
            Some(best) if is_worth_reusing(shared[best], self.idle[best].tokens().len(), prompt.len()) => {
                self.idle.remove(best)
            }
            _ if self.unallocated > 0 => {
                self.unallocated -= 1;
                Sequence::new(decoder, self.context)
            }
            _ => self.idle.remove(0),
        };
        sequence.rewind(sequence.common_prefix(prompt));
        sequence
    }

    /// Returns a sequence, as the most recently used one.
    pub fn put_back(&mut self, sequence: Sequence) {
        self.idle.push(sequence);
    }

    /// Clears the KV caches of all idle sequences.
    pub fn clear(&mut self) {
        for sequence in &mut self.idle {
            sequence.rewind(0);
        }
    }
}

/// Whether the common prefix justifies truncating a sequence: a few tokens, which all prompts of a model may share, do not
/// justify the loss of a long KV cache.
fn is_worth_reusing(shared: usize, own: usize, prompt: usize) -> bool {
    2 * shared >= own.min(prompt) && shared > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_common_prefix_does_not_displace_a_long_sequence() {
        assert!(is_worth_reusing(60, 100, 80) && is_worth_reusing(5, 9, 1000) && is_worth_reusing(5, 1000, 9));
        assert!(!is_worth_reusing(3, 1000, 100) && !is_worth_reusing(0, 0, 10) && !is_worth_reusing(0, 10, 1));
    }
}
