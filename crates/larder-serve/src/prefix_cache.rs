//! Sequences that wait to be used again.

use larder_engine::Sequence;
use larder_model::Decoder;

/// A fixed number of sequences. What the idle ones remember is kept until somebody else needs them.
pub struct PrefixCache {
    /// Least recently used first.
    idle: Vec<Sequence>,
    /// How many may still be made.
    unallocated: usize,
    context: usize,
}

impl PrefixCache {
    /// Room for `count` sequences of `context` tokens.
    pub fn new(count: usize, context: usize) -> Self {
        PrefixCache { idle: Vec::new(), unallocated: count, context }
    }

    /// The sequence that is best for `prompt`, gone back to as much of its beginning as both share and is kept,
    /// always less than all of it. The caller guarantees that not all are taken.
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
        let common = sequence.common_prefix(prompt);
        let kept = sequence.rewind(decoder, common);
        if kept < common {
            // It would all be read again in one go; as part of the prompt it is read in pieces.
            sequence.rewind(decoder, 0);
        }
        sequence
    }

    /// Puts a sequence back, the most recently used one.
    pub fn put_back(&mut self, sequence: Sequence) {
        self.idle.push(sequence);
    }

    /// Nothing that is kept holds any longer.
    pub fn clear(&mut self, decoder: &Decoder) {
        for sequence in &mut self.idle {
            sequence.rewind(decoder, 0);
        }
    }
}

/// A few tokens in common, which all prompts of a model may have, are no reason to give up a long text.
fn is_worth_reusing(shared: usize, own: usize, prompt: usize) -> bool {
    2 * shared >= own.min(prompt) && shared > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_that_everybody_has_is_not_worth_a_long_text() {
        assert!(is_worth_reusing(60, 100, 80) && is_worth_reusing(5, 9, 1000) && is_worth_reusing(5, 1000, 9));
        assert!(!is_worth_reusing(3, 1000, 100) && !is_worth_reusing(0, 0, 10) && !is_worth_reusing(0, 10, 1));
    }
}
