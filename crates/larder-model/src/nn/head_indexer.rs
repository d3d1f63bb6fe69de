//! The indexer of MiniMax's sparse attention (MSA): each of its heads chooses blocks of positions for a part of the heads of attention.

use candle_core::Tensor;

use super::selection::highest;
use super::{ForwardPass, FurtherShape, Index, Norm, Rotary, Selection};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Sizes of the indexer.
#[derive(Clone, Copy)]
pub struct HeadIndexerShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads, each for as many heads of attention.
    pub heads: usize,
    /// Width of a head's query, and of the key that all heads share.
    pub width: usize,
    /// Positions of a block.
    pub block: usize,
    /// The most blocks that are chosen for a token by a head.
    pub top_k: usize,
    /// Blocks up to that of the token itself which come before all others.
    pub local: usize,
}

/// Chooses, for each token and head, the blocks in which the highest product of the query with a key is highest.
pub struct HeadIndexer {
    pub(super) shape: HeadIndexerShape,
    pub(super) query: Linear,    // [heads · width, hidden]
    pub(super) key: Linear,      // [width, hidden]
    pub(super) query_norm: Norm, // [width]
    pub(super) key_norm: Norm,   // [width]
    pub(super) rotary: Rotary,
}

impl HeadIndexer {
    /// Loads the tensors whose names begin with `prefix`; the weights of norms are stored less one, and `eps` is added under their roots. `rotary`
    /// turns the first values of queries and keys.
    pub fn new(
        weights: &mut WeightLoader,
        prefix: &str,
        shape: HeadIndexerShape,
        eps: f64,
        rotary: Rotary,
    ) -> Result<Self> {
        let HeadIndexerShape { hidden, heads, width, .. } = shape;
        let name = |part: &str| format!("{prefix}{part}");
        Ok(HeadIndexer {
            shape,
            query: weights.linear(&name("q_proj"), heads * width, hidden, false)?,
            key: weights.linear(&name("k_proj"), width, hidden, false)?,
            query_norm: Norm::rms_plus_one(weights, &name("q_norm"), width, eps)?,
            key_norm: Norm::rms_plus_one(weights, &name("k_norm"), width, eps)?,
            rotary,
        })
    }

    /// What a layer keeps for it: its keys.
    pub fn kept(&self) -> Vec<FurtherShape> {
        vec![FurtherShape::per_token(1, self.shape.width)]
    }

    /// Heads, each of which makes a selection.
    pub fn heads(&self) -> usize {
        self.shape.heads
    }

    /// The most rows that a token attends to by the choice of a head.
    pub fn most_rows(&self) -> usize {
        self.shape.block.saturating_mul(self.shape.top_k)
    }

    /// Whether a token of the step sees more blocks than it attends to.
    pub(super) fn has_choice(&self, pass: &ForwardPass) -> bool {
        pass.positions().any(|at| (at + 1).div_ceil(self.shape.block) > self.shape.top_k)
    }

    /// Appends the keys of the tokens `x [n, hidden]` to what the layer keeps, and chooses positions for each token: one selection
    /// per head.
    pub fn select(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Vec<Selection>> {
        let HeadIndexerShape { heads, width, block, top_k, local, .. } = self.shape;
        let [query, key] = Linear::forward_all([&self.query, &self.key], x)?;
        let key = self.rotary.apply(&self.key_norm.forward(&key)?.unsqueeze(1)?, pass)?; // [n, 1, width]
        for (i, span) in pass.spans.iter().enumerate() {
            with_f32(&key, |key| states.of_mut(i).further[0].append(span.rows(key, width)))??;
        }
        let has_choice = |seen: usize| seen.div_ceil(block) > top_k;
        if !self.has_choice(pass) {
            return Ok(Vec::new());
        }
        let query = self.query_norm.forward(&query.reshape((pass.tokens(), heads, width))?)?;
        let query = with_f32(&self.rotary.apply(&query, pass)?, <[f32]>::to_vec)?;
        let weights = vec![1.0; pass.tokens() * heads];
        let seen: Vec<usize> = pass.positions().flat_map(|at| std::iter::repeat_n(at + 1, heads)).collect();
        // Each head of a token is a query of its own.
        let mut all = Selection::default();
        for (i, span) in pass.spans.iter().enumerate() {
            let index = Index {
                queries: span.rows(&query, heads * width),
                heads: 1,
                weights: span.rows(&weights, heads),
                rows: &states.of(i).further[0].rows,
                width,
                seen: span.rows(&seen, heads),
                scale: 1.0,
            };
            let choose = |scores: &[f32]| positions_of_best(scores, block, top_k, local);
            index.select_by(self.key.compute(), has_choice, (false, choose), &mut all);
        }
        Ok(all.by_turns(heads))
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let HeadIndexerShape { heads, width, .. } = self.shape;
        4 * heads * width + 3 * width + 3 * heads
    }
}

/// The positions in the `top_k` blocks of `block` positions with the highest score of one of them, where the last `local` blocks come
/// first; of equal blocks the earlier is taken.
fn positions_of_best(scores: &[f32], block: usize, top_k: usize, local: usize) -> Vec<u32> {
    let blocks = best_of_blocks(scores, block, local);
    let range = |number: u32| {
        let start = number as usize * block;
        start as u32..scores.len().min(start + block) as u32
    };
    highest(&blocks, top_k).into_iter().flat_map(range).collect()
}

/// The highest score of each block of `block` scores; the last `local` of them are infinite.
pub fn best_of_blocks(scores: &[f32], block: usize, local: usize) -> Vec<f32> {
    let best = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut blocks: Vec<f32> = scores.chunks(block).map(best).collect();
    blocks.iter_mut().rev().take(local).for_each(|score| *score = f32::INFINITY);
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_come_before_better_ones() {
        let scores = [1.0, 9.0, 2.0, 3.0, 8.0, 0.0, 4.0, 4.0, -5.0];
        assert_eq!(positions_of_best(&scores, 2, 3, 1), [0, 1, 4, 5, 8]);
        assert_eq!(positions_of_best(&scores, 2, 3, 2), [0, 1, 6, 7, 8]);
        assert_eq!(positions_of_best(&scores, 2, 3, 0), [0, 1, 4, 5, 6, 7]);
        assert_eq!(positions_of_best(&scores, 2, 1, 9), [0, 1], "the earliest of equal ones");
        assert_eq!(positions_of_best(&scores, 4, 5, 1), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(positions_of_best(&[f32::NAN, 1.0, 0.5], 1, 2, 0), [1, 2]);
    }
}
