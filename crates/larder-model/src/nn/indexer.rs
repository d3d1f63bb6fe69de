//! The indexer of sparse attention (DSA, the lightning indexer of DeepSeek): small queries and keys that choose the positions
//! which attention goes over. In some models a block of tokens has one key, and is chosen as a whole.

use std::sync::Arc;

use candle_core::Tensor;

use super::{Compressor, CompressorShape, ForwardPass, FurtherShape, Norm, Rotary, Selection, StepIndex};
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
    /// Tokens of a block that has one key, which divide `top_k`; `None` if each token has one.
    pub block: Option<usize>,
}

impl IndexerShape {
    /// The most positions that attention goes over: those that are chosen, and those of a block that is not complete.
    pub fn positions(&self) -> usize {
        self.top_k + self.tokens_per_key() - 1
    }

    pub(super) fn tokens_per_key(&self) -> usize {
        self.block.unwrap_or(1)
    }
}

/// Chooses, for each token, the positions with the highest sum over heads of `weight · max(query · key, 0)`.
pub struct Indexer {
    pub(super) shape: IndexerShape,
    pub(super) query: Linear, // [heads · width, q_rank]
    pub(super) keys: IndexKeys,
    pub(super) weights: Linear, // [heads, hidden]
    pub(super) rotary: Option<Rotary>,
}

/// What makes the keys.
pub(super) enum IndexKeys {
    /// A product `[width, hidden]` and its norm: each token has one.
    OfTokens(Linear, Norm),
    /// Weighted means over the tokens of each complete block.
    OfBlocks(Box<Compressor>),
}

/// Epsilon of the norm of keys, whatever the config says of the others.
const NORM_EPS: f64 = 1e-6;

impl Indexer {
    /// Loads the tensors below `prefix`. `rotary` turns the first values of queries, and of keys of tokens.
    pub fn new(
        weights: &mut WeightLoader,
        prefix: &str,
        shape: IndexerShape,
        rotary: impl Into<Option<Rotary>>,
    ) -> Result<Self> {
        let IndexerShape { hidden, q_rank, heads, width, block, .. } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(Indexer {
            shape,
            query: weights.linear(&name("wq_b"), heads * width, q_rank, false)?,
            keys: match block {
                None => IndexKeys::OfTokens(
                    weights.linear(&name("wk"), width, hidden, false)?,
                    Norm::layer(weights, &name("k_norm"), width, NORM_EPS)?,
                ),
                Some(rate) => {
                    let shape = CompressorShape { hidden, width, rate, overlap: false };
                    IndexKeys::OfBlocks(Box::new(Compressor::of_keys(weights, prefix, shape, NORM_EPS)?))
                }
            },
            weights: weights.linear(&name("weights_proj"), heads, hidden, false)?,
            rotary: rotary.into(),
        })
    }

    /// The most positions that attention goes over.
    pub fn positions(&self) -> usize {
        self.shape.positions()
    }

    /// Whether a token of the step sees more rows than it attends to.
    pub(super) fn has_choice(&self, pass: &ForwardPass) -> bool {
        let block = self.shape.tokens_per_key();
        pass.positions().any(|at| (at + 1) / block > self.shape.top_k / block)
    }

    /// What the indexer keeps of a sequence, the keys last.
    pub fn kept(&self) -> Vec<FurtherShape> {
        match &self.keys {
            IndexKeys::OfTokens(..) => vec![FurtherShape::per_token(1, self.shape.width)],
            IndexKeys::OfBlocks(compressor) => compressor.kept().into(),
        }
    }

    /// Appends what it keeps of the tokens `x [n, hidden]`.
    fn append(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<()> {
        match &self.keys {
            IndexKeys::OfTokens(product, norm) => {
                let key = self.rotated(&norm.forward(&product.forward(x)?)?.unsqueeze(1)?, pass)?; // [n, 1, width]
                for (i, span) in pass.spans.iter().enumerate() {
                    with_f32(&key, |key| states.of_mut(i).further[0].append(span.rows(key, self.shape.width)))??;
                }
            }
            IndexKeys::OfBlocks(compressor) => {
                let parts = compressor.parts(x)?;
                for (i, span) in pass.spans.iter().enumerate() {
                    compressor.append(&parts, span, &mut states.of_mut(i).further)?;
                }
            }
        }
        Ok(())
    }

    /// Queries or keys `x [n, heads, width]`, rotated.
    fn rotated(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.rotary.map_or(Ok(x.clone()), |rotary| rotary.apply(x, pass))
    }

    /// Appends what it keeps of the tokens `x [n, hidden]` to the further rows of their states, which are its own, and chooses
    /// positions for each token; `latent [n, q_rank]` is what the queries of attention are made of.
    pub fn select(
        &self,
        x: &Tensor,
        latent: &Tensor,
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<Arc<Selection>> {
        let IndexerShape { heads, width, top_k, .. } = self.shape;
        self.append(x, states, pass)?;
        let block = self.shape.tokens_per_key();
        let (count, seen) = (top_k / block, pass.positions().map(|at| (at + 1) / block).collect::<Vec<_>>());
        if !self.has_choice(pass) {
            return Ok(Selection::of_all(seen.len()).into());
        }
        let query = self.query.forward(latent)?.reshape((pass.tokens(), heads, width))?;
        let query = with_f32(&self.rotated(&query, pass)?, <[f32]>::to_vec)?;
        let weights = with_f32(&self.weights.forward(x)?.affine((heads as f64).powf(-0.5), 0.0)?, <[f32]>::to_vec)?;
        let keys = self.kept().len() - 1;
        let index = StepIndex { queries: &query, heads, weights: &weights, width, seen: &seen };
        let selection = index.select(self.query.compute(), count, pass, |span| &states.of(span).further[keys].rows);
        Ok(if block == 1 { selection } else { selection.of_blocks(block, pass.positions()) }.into())
    }

    /// Floats per token of what [`select`](Self::select) allocates.
    pub fn scratch(&self) -> usize {
        let IndexerShape { heads, width, .. } = self.shape;
        let keys = match &self.keys {
            IndexKeys::OfTokens(..) => 3 * width,
            IndexKeys::OfBlocks(compressor) => compressor.scratch(),
        };
        3 * (heads * width + heads) + keys + 2
    }
}
