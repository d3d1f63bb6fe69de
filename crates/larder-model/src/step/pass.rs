//! Positions, rotations and attention masks of one step over a ragged batch: some tokens of each of several sequences.

use std::ops::Range;

use parking_lot::Mutex;

use crate::kv::AttentionMask;
use crate::ops::{Few, HandedChoice, RopeTable, Rows};
use crate::step::TokenOrigin;

/// Positions and rotations of the tokens of one step, shared by all layers.
pub struct ForwardPass {
    /// The sequences of the step, in the order of their rows in every tensor of the step.
    pub spans: Vec<SpanPositions>,
    /// One per token of the step.
    pub origins: Vec<TokenOrigin>,
    /// The tokens of the step.
    pub tokens: Vec<u32>,
    /// Whether only a device knows them: there is one, which it has drawn last.
    pub drawn: bool,
    /// Rotations of all tokens, by each of the model's ropes.
    pub ropes: Vec<RopeTable>,
    /// The positions that the last layer with an indexer chose.
    pub handed_on: HandedOn<HandedChoice>,
    /// The state of the last layer's router, `[step tokens, width]`, where routers have one.
    pub router_state: HandedOn<Rows>,
}

/// A value that a layer hands on to the next ones of a step.
pub struct HandedOn<T>(Mutex<Option<T>>);

impl<T> Default for HandedOn<T> {
    fn default() -> Self {
        HandedOn(Mutex::new(None))
    }
}

impl<T: Clone> HandedOn<T> {
    /// Replaces the value.
    pub fn set(&self, value: T) {
        *self.0.lock() = Some(value);
    }

    /// The value of the nearest layer before that had one.
    pub fn get(&self) -> Option<T> {
        self.0.lock().clone()
    }
}

/// Positions of consecutive tokens of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpanPositions {
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Row of the first token in the tensors of the step.
    pub first_row: usize,
}

impl ForwardPass {
    /// Number of tokens of all spans.
    pub fn tokens(&self) -> usize {
        self.origins.len()
    }

    /// The range of positions that each token attends to, its own included, for the tokens of all spans.
    pub fn visible_ranges(&self, mask: AttentionMask) -> Few<Range<usize>> {
        self.positions().map(|at| mask.first_visible(at)..at + 1).collect()
    }

    /// The position of each token in its sequence.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.spans.iter().flat_map(|span| span.start..span.start + span.tokens)
    }
}

impl SpanPositions {
    /// The part of `values [step tokens, width]` that belongs to this span.
    pub fn rows<'a, T>(&self, values: &'a [T], width: usize) -> &'a [T] {
        &values[self.first_row * width..][..self.tokens * width]
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
                let spans = vec![SpanPositions { start, tokens, first_row: 0 }];
                let pass = ForwardPass {
                    spans,
                    origins: vec![TokenOrigin::default(); tokens],
                    tokens: vec![0; tokens],
                    drawn: false,
                    ropes: vec![],
                    handed_on: HandedOn::default(),
                    router_state: HandedOn::default(),
                };
                let seen = pass.visible_ranges(mask);
                let seen: Vec<Vec<usize>> = seen.into_iter().map(Iterator::collect).collect();
                assert_eq!(seen, want, "{mask:?} at {start}+{tokens}");
            }
        }
    }
}
