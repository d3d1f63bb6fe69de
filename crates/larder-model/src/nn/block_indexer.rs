//! The indexer of Qwen4's sparse attention (QSA): small queries, and a key for each block of tokens, choose the blocks which attention
//! goes over beside the last, incomplete one.

use candle_core::{D, Device, Tensor};
use larder_core::KV_PAGE_TOKENS;

use super::{
    AttentionMask, ForwardPass, FurtherRows, FurtherShape, Norm, Rope, RopeTable, Rotary, RowShape, Selection,
    StepIndex,
};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

/// Sizes of the indexer.
#[derive(Clone, Copy)]
pub struct BlockIndexerShape {
    /// Heads of queries.
    pub heads: usize,
    /// Width of a query, and of a key.
    pub width: usize,
    /// Tokens of a block.
    pub tokens: usize,
    /// The most blocks that are chosen for a token.
    pub blocks: usize,
}

/// The products of queries and keys.
pub enum IndexProducts {
    /// `[(heads + 1) · width, hidden]`: the rows of all queries, then of the key.
    Joined(Linear),
    /// `[heads · width, hidden]` and `[width, hidden]`.
    Apart(Linear, Linear),
}

/// Chooses, for each token, the complete blocks with the highest sum over heads of `max(query · key, 0)`. The key of a block is the
/// mean of those of its tokens, normalised and rotated by its first position.
pub struct BlockIndexer {
    /// Sizes.
    pub shape: BlockIndexerShape,
    /// Of what queries and keys are made.
    pub products: IndexProducts,
    /// Over each query.
    pub query_norm: Norm,
    /// Over the key of a block.
    pub key_norm: Norm,
    /// The angles of positions.
    pub rope: Rope,
    /// Rotates the first values of queries and keys.
    pub rotary: Rotary,
}

impl BlockIndexer {
    /// What a layer keeps for it: the keys of the tokens of the block that is not complete, and those of the blocks.
    pub fn kept(&self) -> Vec<FurtherShape> {
        let BlockIndexerShape { width, tokens, .. } = self.shape;
        let row = RowShape { heads: 1, width };
        vec![
            FurtherShape { row, tokens_per_row: 1, chosen: None, mask: AttentionMask::SlidingWindow(tokens) },
            FurtherShape { row, tokens_per_row: tokens, mask: AttentionMask::Causal, chosen: None },
        ]
    }

    /// The most rows that a token attends to.
    pub fn most_rows(&self) -> usize {
        (self.shape.blocks + 1).saturating_mul(self.shape.tokens)
    }

    /// Whether a token of the step sees more blocks than it attends to.
    pub(super) fn has_choice(&self, pass: &ForwardPass) -> bool {
        pass.positions().any(|at| (at + 1) / self.shape.tokens > self.shape.blocks)
    }

    /// Appends the keys of the tokens `x [n, hidden]` to what the layer keeps, and chooses positions for each token.
    pub fn select(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Selection> {
        let BlockIndexerShape { heads, width, tokens, blocks } = self.shape;
        let [queries, keys] = self.queries_and_keys(x)?;
        for (i, span) in pass.spans.iter().enumerate() {
            with_f32(&keys, |keys| self.append(span.rows(keys, width), &mut states.of_mut(i).further))??;
        }
        let seen: Vec<usize> = pass.positions().map(|at| (at + 1) / tokens).collect();
        if !self.has_choice(pass) {
            return Ok(Selection::of_all(seen.len()));
        }
        let queries = self.query_norm.forward(&queries.reshape((pass.tokens(), heads, width))?)?;
        let queries = with_f32(&self.rotary.apply(&queries, pass)?, <[f32]>::to_vec)?;
        let weights = vec![1.0; pass.tokens() * heads];
        let index = StepIndex { queries: &queries, heads, weights: &weights, width, seen: &seen };
        let selection = index.select(self.compute(), blocks, pass, |span| &states.of(span).further[1].rows);
        Ok(selection.of_blocks(tokens, pass.positions()))
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let BlockIndexerShape { heads, width, .. } = self.shape;
        // Both products together and apart; queries normalised and rotated; the weights of heads.
        2 * (heads + 1) * width + 3 * heads * width + heads + 2
    }

    fn compute(&self) -> &crate::compute::ComputeContext {
        let (IndexProducts::Joined(product) | IndexProducts::Apart(product, _)) = &self.products;
        product.compute()
    }

    /// `[n, heads · width]` and `[n, width]`
    fn queries_and_keys(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let BlockIndexerShape { heads, width, .. } = self.shape;
        match &self.products {
            IndexProducts::Joined(product) => {
                let both = product.forward(x)?;
                let part = |at, width| both.narrow(D::Minus1, at, width)?.contiguous();
                Ok([part(0, heads * width)?, part(heads * width, width)?])
            }
            IndexProducts::Apart(query, key) => Linear::forward_all([query, key], x),
        }
    }

    /// Appends the keys of a span's tokens, and those of the blocks that are then complete.
    fn append(&self, keys: &[f32], kept: &mut [FurtherRows]) -> Result<()> {
        let [tokens, blocks] = kept else { unreachable!("two kinds of rows are kept") };
        for keys in keys.chunks(KV_PAGE_TOKENS * self.shape.width) {
            tokens.append(keys)?;
            while blocks.rows.len() < tokens.rows.len() / self.shape.tokens {
                blocks.append(&self.key_of_block(tokens, blocks.rows.len())?)?;
            }
            tokens.release_unneeded();
        }
        Ok(())
    }

    /// The key of a complete block.
    fn key_of_block(&self, keys: &FurtherRows, block: usize) -> Result<Vec<f32>> {
        let BlockIndexerShape { width, tokens, .. } = self.shape;
        let first = block * tokens;
        let mut mean = vec![0.0; width];
        for key in keys.rows.widened(first..first + tokens, width).chunks_exact(width) {
            mean.iter_mut().zip(key).for_each(|(mean, key)| *mean += key);
        }
        mean.iter_mut().for_each(|mean| *mean /= tokens as f32);
        let key = self.key_norm.forward(&Tensor::from_vec(mean, (1, width), &Device::Cpu)?)?;
        let mut key = with_f32(&key, <[f32]>::to_vec)?;
        let mut turns = RopeTable::default();
        self.rope.extend(&mut turns, first..first + 1, first + 1);
        self.rotary.rotate_head(&mut key, &turns);
        Ok(key)
    }
}
