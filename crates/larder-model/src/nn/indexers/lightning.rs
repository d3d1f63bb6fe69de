//! The indexer of sparse attention (DSA, the lightning indexer of DeepSeek): small queries and keys that choose the
//! positions which attention goes over. In some models a block of tokens has one key, and is chosen as a whole.

use super::index_choice::{NewIndexRows, choose, head_rotation};
use crate::error::Result;
use crate::kv::AuxiliaryShape;
use crate::nn::{Compressor, CompressorShape, Norm};
use crate::ops::{IndexBlocks, IndexChoice, ListLengths, Ops, Rotary, Rows, SeenRows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

/// Sizes of an indexer.
#[derive(Clone, Copy)]
pub struct IndexerShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rank of the query's low-rank projection in attention, whose result the queries of the indexer are made of.
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
    /// A matmul `[width, hidden]` and its norm: each token has one.
    OfTokens(Linear, Box<Norm>),
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
                    Norm::layer(weights, &name("k_norm"), width, NORM_EPS)?.into(),
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
    pub fn kept(&self) -> Vec<AuxiliaryShape> {
        match &self.keys {
            IndexKeys::OfTokens(..) => vec![AuxiliaryShape::per_token(1, self.shape.width)],
            IndexKeys::OfBlocks(compressor) => compressor.kept().into(),
        }
    }

    /// The matmuls with the input of attention that [`select`](Self::select) reads.
    pub(in crate::nn) fn products(&self, pass: &ForwardPass) -> Vec<&Linear> {
        let mut products = match &self.keys {
            IndexKeys::OfTokens(key, _) => vec![key],
            IndexKeys::OfBlocks(compressor) => vec![&compressor.values, &compressor.logits],
        };
        products.extend(self.has_choice(pass).then_some(&self.weights));
        products
    }

    /// Appends what it keeps of the tokens to the auxiliary rows of their states, which are its own, and chooses
    /// positions for each token; `products` are its [`products`](Self::products), and `latent [n, q_rank]` is what the
    /// queries of attention are made of.
    pub(in crate::nn) fn select(
        &self,
        products: &[Rows],
        latent: Rows,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<ListLengths> {
        let (heads, has_choice) = (self.shape.heads, self.has_choice(pass));
        let query = has_choice.then(|| self.query.forward(latent, ops)).transpose()?;
        let rotation = head_rotation(self.rotary, 0, &pass.ropes);
        let queries = match &self.keys {
            IndexKeys::OfTokens(_, norm) => {
                let keys = norm.forward(products[0], ops)?;
                for (i, span) in pass.spans.iter().enumerate() {
                    states.of_mut(i).auxiliary[0].extend(span.tokens)?;
                }
                let new = NewIndexRows { queries: query, keys, rotation, norm: None };
                let queries = new.write(heads, |span| &states.of(span).auxiliary[0].rows, pass, ops)?;
                query.map(|_| queries)
            }
            IndexKeys::OfBlocks(compressor) => {
                compressor.append([products[0], products[1]], (states, 0), pass, ops)?;
                match (query, rotation) {
                    (Some(query), Some(_)) => Some(ops.rotate_heads(query, heads, None, rotation)?),
                    (query, _) => query,
                }
            }
        };
        let Some((queries, weights)) = queries.zip(products.last().copied()) else { return Ok(None) };
        let block = self.shape.tokens_per_key();
        let seen: Vec<SeenRows> =
            pass.positions().map(|at| SeenRows { rows: (at + 1) / block, positions: at + 1 }).collect();
        let index = IndexChoice {
            queries,
            weights: Some(ops.scale(weights, (heads as f64).powf(-0.5) as f32)?),
            parts: 1,
            heads,
            scale: (self.shape.width as f64).powf(-0.5) as f32,
            rectified: true,
            count: self.shape.top_k / block,
            blocks: IndexBlocks::OfPositions(block),
            seen: &seen,
        };
        let keys = self.kept().len() - 1;
        choose(&index, |span| &states.of(span).auxiliary[keys].rows, pass, ops)
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
