//! Operations of chains on residual streams, several of which are side by side in a row.

use super::Rows;
use crate::error::Result;

/// How what a matmul yields becomes weights of manifold-constrained hyper-connections.
#[derive(Clone, Copy, Debug)]
pub struct ManifoldWeights {
    /// Factors on what the matmul yields: of weights to read, to write, and to mix.
    pub scale: [f32; 3],
    /// Added after the factors, values that are [kept](super::Ops::keep).
    pub base: usize,
    /// Added to weights and sums.
    pub eps: f32,
    /// Normalisations of rows and of columns.
    pub iterations: usize,
}

/// What rows of weights have, by which a part's output is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamMix {
    /// A weight for each stream.
    Weights,
    /// Weights to read, weights to write, and the matrix `[from, to]` that mixes the streams.
    Matrix,
}

impl StreamMix {
    /// Numbers of a row for `count` streams.
    pub fn width(self, count: usize) -> usize {
        match self {
            StreamMix::Weights => count,
            StreamMix::Matrix => count * (2 + count),
        }
    }
}

/// Both sides of a residual addition, each with a scale and a bias by channel that are [kept](super::Ops::keep).
#[derive(Clone, Copy, Debug)]
pub struct ScaledSides {
    /// Scale and bias of a part's output.
    pub y: [usize; 2],
    /// Those of the stream.
    pub stream: [usize; 2],
}

/// A function of gates, divided by the number of streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamGate {
    /// `silu(x / count)`
    Silu,
    /// `2 · sigmoid(x / count)`
    TwiceSigmoid,
}

/// The most streams whose matrix a device makes doubly stochastic.
pub const MATRIX_STREAMS: usize = 5;

/// Operations on residual streams `[tokens, count · hidden]`.
pub trait HyperConnectionOps {
    /// The RMS norm of each of `groups` parts of the rows, times weights for all parts of a row that are
    /// [kept](super::Ops::keep).
    fn rms_groups(&self, x: Rows, groups: usize, weight: Option<usize>, eps: f64) -> Result<Rows>;

    /// Weights of what a matmul yields, `[tokens, count · (2 + count)]`, as [`StreamMix::Matrix`] has them, or of
    /// `[tokens, count]`, to read alone.
    fn stream_weights(&self, products: Rows, count: usize, weights: &ManifoldWeights) -> Result<Rows>;

    /// The sum of `count` streams times the first weights of a row; without weights their mean. `[tokens, hidden]`
    fn read_streams(&self, streams: Rows, count: usize, weights: Option<Rows>) -> Result<Rows>;

    /// The streams after a part of a layer with the output `y [tokens, hidden]`.
    fn write_streams(&self, streams: Rows, y: Rows, mix: (Rows, StreamMix)) -> Result<Rows>;

    /// `(y + bias) · scale + (stream + bias) · scale`, of one stream and a part's output.
    fn add_scaled_sides(&self, stream: Rows, y: Rows, sides: &ScaledSides) -> Result<Rows>;

    /// Values of each token times a gate for each of `count` streams, `[tokens, count · hidden]`, of keys and queries
    /// of that width and values `[tokens, hidden]`: the sigmoid of the signed root of a key's product with its query,
    /// which is divided by the root of their width.
    fn gate_by_keys(&self, rows: [Rows; 3], count: usize) -> Result<Rows>;

    /// A function of the gates of `count` streams. May overwrite `x`.
    fn stream_gates(&self, x: Rows, count: usize, gate: StreamGate) -> Result<Rows>;

    /// The mean over `count` streams of `sigmoid(gates) · x`: `[tokens, hidden]`.
    fn gated_mean(&self, x: Rows, gates: Rows, count: usize) -> Result<Rows>;
}
