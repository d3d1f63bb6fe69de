//! Operations of chains for convolved queries and keys (compressed convolutional attention).

use super::{Rows, StateSpan};
use crate::error::Result;

/// The depthwise convolution of queries and keys, behind which a matmul mixes the channels of each head. Weights are
/// values that are [kept](super::Ops::keep). A state has the inputs of all rows that the next token needs, and then the
/// values that it gets.
#[derive(Clone, Copy, Debug)]
pub struct HeadConvolution {
    /// `[tokens, heads · head_dim]`
    pub queries: Rows,
    /// `[tokens, kv_heads · head_dim]`: with the queries the channels.
    pub keys: Rows,
    /// `[tokens, any]`: values for the next token.
    pub delayed: Rows,
    /// `[widths[0], channels]`
    pub taps: usize,
    /// `[channels]`
    pub bias: usize,
    /// As a row of the values for the next token; added to them there.
    pub delayed_bias: Option<usize>,
    /// Width of a head.
    pub head_dim: usize,
    /// Inputs that are added up, and convolved rows that the matmul reads.
    pub widths: [usize; 2],
}

/// How what was projected and what was convolved become queries and keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadMix {
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// `[channels]`, added to what was convolved.
    pub bias: usize,
    /// `[kv_heads]`: factors on the lengths of keys.
    pub factors: usize,
}

/// Operations on convolved queries and keys.
pub trait CcaOps {
    /// Convolves the tokens of these spans, all rows of the inputs, and updates the states. Yields for each token the
    /// last convolved rows by head, `[tokens, heads and kv_heads, widths[1], head_dim]`, and the values of the token
    /// before.
    fn convolve_heads(&self, convolution: &HeadConvolution, spans: &[StateSpan]) -> Result<[Rows; 2]>;

    /// Queries and keys of what was projected, queries and keys, and of what was convolved, `[tokens, channels]`.
    fn mix_heads(&self, rows: [Rows; 3], mix: &HeadMix) -> Result<[Rows; 2]>;
}
