use candle_core::{Device, Tensor};

use super::rope::RopeTable;
use crate::error::Result;

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

/// The keys that a run of queries looks at.
pub struct Span {
    /// The first position that any of them sees.
    pub from: usize,
    /// `[queries, keys from `from` on]`: 0 where a query sees, −∞ where it does not. `None` if each sees all.
    pub mask: Option<Tensor>,
}

impl Span {
    /// For queries at `start..start + tokens`.
    pub fn new(visible: Visible, start: usize, tokens: usize) -> Result<Self> {
        let from = visible.first(start);
        let keys = start + tokens - from;
        if tokens == 1 {
            return Ok(Span { from, mask: None });
        }
        let mut mask = vec![f32::NEG_INFINITY; tokens * keys];
        for (i, row) in mask.chunks_exact_mut(keys).enumerate() {
            let at = start + i;
            row[visible.first(at) - from..=at - from].fill(0.0);
        }
        Ok(Span { from, mask: Some(Tensor::from_vec(mask, (tokens, keys), &Device::Cpu)?) })
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
    /// One span for each kind of visibility that the model's layers have.
    pub spans: Vec<(Visible, Span)>,
}

impl Pass {
    /// The span of one kind of visibility.
    pub fn span(&self, visible: Visible) -> &Span {
        let found = self.spans.iter().find(|(v, _)| *v == visible);
        &found.expect("a pass is made with the visibilities of all layers").1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(visible: Visible, start: usize, tokens: usize) -> Vec<Vec<usize>> {
        let span = Span::new(visible, start, tokens).unwrap();
        let keys = start + tokens - span.from;
        let rows = match &span.mask {
            Some(mask) => mask.to_vec2::<f32>().unwrap(),
            None => vec![vec![0.0; keys]],
        };
        rows.iter().map(|row| (0..keys).filter(|k| row[*k] == 0.0).map(|k| k + span.from).collect()).collect()
    }

    #[test]
    fn masks_follow_the_definition() {
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
                assert_eq!(seen(visible, start, tokens), want, "{visible:?} at {start}+{tokens}");
            }
        }
    }
}
