//! One forward pass: its positions, rotations and attention masks.

use std::ops::Range;

use super::rope::RopeTable;

/// The earlier positions that a query attends to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionMask {
    /// All earlier positions.
    Causal,
    /// The last `n` positions, its own included.
    SlidingWindow(usize),
    /// The positions of its own chunk of `n` positions.
    Chunked(usize),
}

impl AttentionMask {
    /// The first position that a query at position `at` attends to.
    pub fn first_visible(self, at: usize) -> usize {
        match self {
            AttentionMask::Causal => 0,
            AttentionMask::SlidingWindow(width) => (at + 1).saturating_sub(width),
            AttentionMask::Chunked(width) => at / width * width,
        }
    }
}

/// Positions and rotations of one forward pass, shared by all layers.
pub struct ForwardPass {
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Rotations for these positions, if the model has any.
    pub rope: Option<RopeTable>,
}

impl ForwardPass {
    /// The range of positions that each token attends to, its own included.
    pub fn visible_ranges(&self, mask: AttentionMask) -> Vec<Range<usize>> {
        (self.start..self.start + self.tokens).map(|at| mask.first_visible(at)..at + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_ranges_follow_the_definition() {
        for mask in [
            AttentionMask::Causal,
            AttentionMask::SlidingWindow(3),
            AttentionMask::SlidingWindow(1),
            AttentionMask::Chunked(4),
        ] {
            for (start, tokens) in [(0, 1), (0, 6), (5, 1), (5, 4), (8, 2)] {
                let want: Vec<Vec<usize>> = (start..start + tokens)
                    .map(|i| {
                        let sees = |j: &usize| match mask {
                            AttentionMask::Causal => true,
                            AttentionMask::SlidingWindow(w) => i - j < w,
                            AttentionMask::Chunked(c) => i / c == j / c,
                        };
                        (0..=i).filter(sees).collect()
                    })
                    .collect();
                let seen = ForwardPass { start, tokens, rope: None }.visible_ranges(mask);
                let seen: Vec<Vec<usize>> = seen.into_iter().map(Iterator::collect).collect();
                assert_eq!(seen, want, "{mask:?} at {start}+{tokens}");
            }
        }
    }
}
