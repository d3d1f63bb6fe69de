//! Features of n-grams: rows of a table that the last tokens have by hash, gated by the residual streams and convolved.
//!
//! ```text
//! e = rows of the n-grams that end with the token, side by side
//! gate = sigmoid(root(rms(key(e)) · rms(x) / √hidden))      for each stream; root(g) = sign(g) · √|g|
//! v = gate · value(e);  out = v + silu(conv(rms(v)))        a dilated causal depthwise convolution
//! ```

use candle_core::{Device, Tensor};
use larder_core::Rng;

use super::activation::{sigmoid, silu};
use super::{CausalConv, ForwardPass, LayerKv, LayerShape, Mixer, Norm, StateLens, TokenScratch};
use crate::embedding::EmbeddingRows;
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::row_cache::RowTraffic;
use crate::step::LayerStates;

mod hash;

pub use hash::{NGramHash, primes};

/// The least absolute value of a gate's root.
const LEAST: f32 = 1e-6;

/// The features of the n-grams of a layer.
pub struct NGramFeatures {
    /// Which rows a token has.
    pub hash: NGramHash,
    /// The table.
    pub table: Box<dyn EmbeddingRows>,
    /// Residual streams.
    pub streams: usize,
    /// `[streams · hidden, width]`, where `width` is that of all rows of a token.
    pub key: Linear,
    /// `[hidden, width]`
    pub value: Linear,
    /// Norms of keys, of the streams and of what is convolved, each over each stream.
    pub norms: [Norm; 3],
    /// Over the values of all streams.
    pub conv: CausalConv,
}
