//! The choice of the rows that the queries of sparse attention attend to, by the scores of an indexer.

use crate::ops::{SCORES, gather_bytes};

/// Sizes of a mixer's choice of rows.
#[derive(Clone, Copy)]
pub struct ChoiceShape {
    /// Lists of rows per token: one, or one for each part of the heads.
    pub lists: usize,
    /// The most rows of a list.
    pub rows: usize,
    /// Values of a row, of keys and values together as far as they are apart.
    pub values: usize,
}

impl ChoiceShape {
    /// The most bytes that choice and attention take in a model of `context` tokens, whatever the number of tokens of a
    /// step: copies of rows, scores, and the order of these.
    pub fn fixed_bytes(self, context: usize) -> usize {
        let scores = SCORES.max(context).saturating_mul(size_of::<f32>() + size_of::<u32>());
        gather_bytes(self.rows.min(context), self.values).saturating_add(scores)
    }

    /// Bytes of the choice per token of a step.
    pub fn bytes_per_token(self, context: usize) -> usize {
        let list = size_of::<Option<Vec<u32>>>() + self.rows.min(context).saturating_mul(size_of::<u32>());
        // Lists are made before they are divided among the parts of the heads.
        if self.lists == 1 { list } else { self.lists.saturating_mul(list + size_of::<Option<Vec<u32>>>()) }
    }
}
