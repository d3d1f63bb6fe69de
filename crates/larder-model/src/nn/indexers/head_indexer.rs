//! The indexer of MiniMax's sparse attention (MSA): each of its heads chooses blocks of positions for a part of the
//! heads of attention.

use std::iter;

use super::index_choice::{NewIndexRows, choose, head_rotation};
use crate::error::Result;
use crate::kv::AuxiliaryShape;
use crate::nn::Norm;
use crate::ops::{HeadNorm, IndexBlocks, IndexChoice, ListLengths, Ops, Rotary, Rows, SeenRows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

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
    /// Loads the tensors whose names begin with `prefix`; the weights of norms are stored less one, and `eps` is added
    /// under their roots. `rotary` turns the first values of queries and keys.
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
    pub fn kept(&self) -> Vec<AuxiliaryShape> {
        vec![AuxiliaryShape::per_token(1, self.shape.width)]
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

    /// The matmuls with the input of attention that [`select`](Self::select) reads.
    pub(super) fn products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        if self.has_choice(pass) { vec![&self.key, &self.query] } else { vec![&self.key] }
    }

    /// Appends the keys of the tokens to what the layer keeps, and chooses positions for each token: a list for each
    /// head.
    pub(super) fn select(
        &self,
        products: &[Rows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<ListLengths> {
        let HeadIndexerShape { heads, block, top_k, local, .. } = self.shape;
        let [(of_queries, query_eps), (of_keys, key_eps)] = [&self.query_norm, &self.key_norm].map(Norm::rms_parts);
        let (weights, eps) = ([Some(of_queries.of(ops)?), Some(of_keys.of(ops)?)], [query_eps, key_eps]);
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).auxiliary[0].extend(span.tokens)?;
        }
        let rows = |span: usize| &states.of(span).auxiliary[0].rows;
        let new = NewIndexRows {
            queries: products.get(1).copied(),
            keys: products[0],
            rotation: head_rotation(Some(self.rotary), 0, &pass.ropes),
            norm: Some(HeadNorm { weights, eps, whole: false, width: None, after_rotation: false }),
        };
        let queries = new.write(heads, rows, pass, ops)?;
        if new.queries.is_none() {
            return Ok(None);
        }
        let all = |at: usize| iter::repeat_n(SeenRows { rows: at + 1, positions: at + 1 }, heads);
        let seen: Vec<SeenRows> = pass.positions().flat_map(all).collect();
        let index = IndexChoice {
            queries,
            weights: None,
            parts: heads,
            heads: 1,
            scale: 1.0,
            rectified: false,
            count: top_k,
            blocks: IndexBlocks::OfRows { rows: block, local },
            seen: &seen,
        };
        choose(&index, rows, pass, ops)
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let HeadIndexerShape { heads, width, .. } = self.shape;
        4 * heads * width + 3 * width + 3 * heads
    }
}
