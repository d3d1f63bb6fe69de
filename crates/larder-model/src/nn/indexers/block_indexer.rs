//! The indexer of Qwen4's sparse attention (QSA): small queries, and a key for each block of tokens, choose the blocks
//! which attention goes over beside the last, incomplete one.

use super::block_keys::BlockKeys;
use super::index_choice::{choose, head_rotation};
use crate::error::Result;
use crate::kv::{AttentionMask, AuxiliaryShape, RowShape};
use crate::nn::{Norm, Rope};
use crate::ops::{BlockPooling, IndexBlocks, IndexChoice, ListLengths, Ops, Rotary, Rows, SeenRows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::Linear;

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

/// The matmuls of queries and keys.
pub enum IndexProducts {
    /// `[(heads + 1) · width, hidden]`: the rows of all queries, then of the key.
    Joined(Linear),
    /// `[heads · width, hidden]` and `[width, hidden]`.
    Apart(Linear, Linear),
}

/// Chooses, for each token, the complete blocks with the highest sum over heads of `max(query · key, 0)`. The key of a
/// block is the mean of those of its tokens, normalised and rotated by its first position.
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
    pub fn kept(&self) -> Vec<AuxiliaryShape> {
        let BlockIndexerShape { width, tokens, .. } = self.shape;
        let row = RowShape { heads: 1, width };
        vec![
            AuxiliaryShape { row, tokens_per_row: 1, chosen: None, mask: AttentionMask::SlidingWindow(tokens) },
            AuxiliaryShape { row, tokens_per_row: tokens, mask: AttentionMask::Causal, chosen: None },
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

    /// The matmuls with the input of attention that [`select`](Self::select) reads.
    pub(super) fn products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        match &self.products {
            IndexProducts::Joined(product) => vec![product],
            IndexProducts::Apart(query, key) if self.has_choice(pass) => vec![key, query],
            IndexProducts::Apart(_, key) => vec![key],
        }
    }

    /// Appends the keys of the tokens to what the layer keeps, and chooses positions for each token.
    pub(super) fn select(
        &self,
        products: &[Rows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<ListLengths> {
        let BlockIndexerShape { heads, width, tokens, blocks } = self.shape;
        let keys = match &self.products {
            IndexProducts::Joined(_) => ops.columns(products[0], heads * width, width)?,
            IndexProducts::Apart(..) => products[0],
        };
        let of_blocks = BlockKeys {
            pooling: BlockPooling { rate: tokens, places: None, overlap: false },
            norm: &self.key_norm,
            rotation: Some((&self.rope, self.rotary, 0)),
        };
        of_blocks.append(keys, (states, 0), pass, ops)?;
        if !self.has_choice(pass) {
            return Ok(None);
        }
        let queries = match &self.products {
            IndexProducts::Joined(_) => ops.columns(products[0], 0, heads * width)?,
            IndexProducts::Apart(..) => products[1],
        };
        let (weight, eps) = self.query_norm.rms_parts();
        let norm = Some((weight.of(ops)?, eps));
        let queries = ops.rotate_heads(queries, heads, norm, head_rotation(Some(self.rotary), 0, &pass.ropes))?;
        let seen: Vec<SeenRows> =
            pass.positions().map(|at| SeenRows { rows: (at + 1) / tokens, positions: at + 1 }).collect();
        let index = IndexChoice {
            queries,
            weights: None,
            parts: 1,
            heads,
            scale: (width as f64).powf(-0.5) as f32,
            rectified: true,
            count: blocks,
            blocks: IndexBlocks::OfPositions(tokens),
            seen: &seen,
        };
        choose(&index, |span| &states.of(span).auxiliary[1].rows, pass, ops)
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let BlockIndexerShape { heads, width, .. } = self.shape;
        // Both matmuls together and apart; queries normalised and rotated; the weights of heads.
        2 * (heads + 1) * width + 3 * heads * width + heads + 2
    }
}
