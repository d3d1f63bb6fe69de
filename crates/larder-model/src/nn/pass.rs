use std::ops::Range;

use super::rope::RopeTable;

/// Which earlier positions a query may look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Visible {
    /// All of them.
    All,
    /// The last so many, itself included.
    Window(usize),
    /// Those in its own run of so many positions.
    Chunk(usize),
}

impl Visible {
    /// The first position that a query at `at` sees.
    pub fn first(self, at: usize) -> usize {
        match self {
            Visible::All => 0,
            Visible::Window(width) => (at + 1).saturating_sub(width),
            Visible::Chunk(width) => at / width * width,
        }
    }
}

/// What every layer needs to know about one forward pass.
pub struct Pass {
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Rotations for these positions, if the model has any.
    pub rope: Option<RopeTable>,
}

impl Pass {
    /// The positions that each token sees, itself included.
    pub fn seen(&self, visible: Visible) -> Vec<Range<usize>> {
        (self.start..self.start + self.tokens).map(|at| visible.first(at)..at + 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_follows_the_definition() {
        for visible in [Visible::All, Visible::Window(3), Visible::Window(1), Visible::Chunk(4)] {
            for (start, tokens) in [(0, 1), (0, 6), (5, 1), (5, 4), (8, 2)] {
                let want: Vec<Vec<usize>> = (start..start + tokens)
                    .map(|i| {
                        let sees = |j: &usize| match visible {
                            Visible::All => true,
                            Visible::Window(w) => i - j < w,
                            Visible::Chunk(c) => i / c == j / c,
                        };
                        (0..=i).filter(sees).collect()
                    })
                    .collect();
                let seen = Pass { start, tokens, rope: None }.seen(visible);
                let seen: Vec<Vec<usize>> = seen.into_iter().map(Iterator::collect).collect();
                assert_eq!(seen, want, "{visible:?} at {start}+{tokens}");
            }
        }
    }
}
