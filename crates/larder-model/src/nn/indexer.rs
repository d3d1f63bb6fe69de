//! The indexer of sparse attention (DSA, the lightning indexer of DeepSeek): small queries and keys that choose the positions
//! which attention goes over.

use std::sync::Arc;

use candle_core::Tensor;

use super::{ForwardPass, FurtherShape, Index, Norm, Rotary, Selection};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Sizes of an indexer.
#[derive(Clone, Copy)]
pub struct IndexerShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rank of the query's low-rank product in attention, whose result the queries of the indexer are made of.
    pub q_rank: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head's query, and of the key that all heads share.
    pub width: usize,
    /// The most positions that are chosen for a token.
    pub top_k: usize,
}

/// Chooses, for each token, the positions with the highest sum over heads of `weight · max(query · key, 0)`.
pub struct Indexer {
    shape: IndexerShape,
    query: Linear,   // [heads · width, q_rank]
    key: Linear,     // [width, hidden]
    key_norm: Norm,  // [width]
    weights: Linear, // [heads, hidden]
    rotary: Rotary,
}

/// Epsilon of the norm of keys, whatever the config says of the others.
const NORM_EPS: f64 = 1e-6;

impl Indexer {
    /// Loads the tensors below `prefix`. `rotary` turns the first values of queries and keys.
    pub fn new(weights: &mut WeightLoader, prefix: &str, shape: IndexerShape, rotary: Rotary) -> Result<Self> {
        let IndexerShape { hidden, q_rank, heads, width, .. } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(Indexer {
            shape,
            query: weights.linear(&name("wq_b"), heads * width, q_rank, false)?,
            key: weights.linear(&name("wk"), width, hidden, false)?,
            key_norm: Norm::layer(weights, &name("k_norm"), width, NORM_EPS)?,
            weights: weights.linear(&name("weights_proj"), heads, hidden, false)?,
            rotary,
        })
    }

    /// The most positions that are chosen for a token.
    pub fn top_k(&self) -> usize {
        self.shape.top_k
    }

    /// The rows that the indexer keeps of a sequence: its keys.
    pub fn rows(&self) -> FurtherShape {
        FurtherShape::per_token(1, self.shape.width)
    }

    /// Appends the keys of the tokens `x [n, hidden]` to the further rows number `number`, and chooses positions for each token; `latent
    /// [n, q_rank]` is what the queries of attention are made of.
    pub fn select(
        &self,
        x: &Tensor,
        latent: &Tensor,
        states: &mut LayerStates,
        pass: &ForwardPass,
        number: usize,
    ) -> Result<Arc<Selection>> {
        let IndexerShape { heads, width, top_k, .. } = self.shape;
        let key = self.key_norm.forward(&self.key.forward(x)?)?.unsqueeze(1)?;
        let key = self.rotary.apply(&key, pass)?; // [n, 1, width]
        for (i, span) in pass.spans.iter().enumerate() {
            with_f32(&key, |key| states.of_mut(i).further[number].append(span.rows(key, width)))??;
        }
        let mut selection = Selection::default();
        if pass.positions().all(|at| at < top_k) {
            pass.positions().for_each(|_| selection.push_all());
            return Ok(selection.into());
        }
        let query = self.query.forward(latent)?.reshape((pass.tokens(), heads, width))?;
        let query = with_f32(&self.rotary.apply(&query, pass)?, <[f32]>::to_vec)?;
        let weights = with_f32(&self.weights.forward(x)?.affine((heads as f64).powf(-0.5), 0.0)?, <[f32]>::to_vec)?;
        let seen: Vec<usize> = pass.positions().map(|at| at + 1).collect();
        for (i, span) in pass.spans.iter().enumerate() {
            let index = Index {
                queries: span.rows(&query, heads * width),
                heads,
                weights: span.rows(&weights, heads),
                rows: &states.of(i).further[number].rows,
                width,
                seen: span.rows(&seen, 1),
                scale: (width as f64).powf(-0.5) as f32,
            };
            index.select(self.key.compute(), top_k, &mut selection);
        }
        Ok(selection.into())
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let IndexerShape { heads, width, .. } = self.shape;
        3 * (heads * width + width + heads) + 2
    }
}
