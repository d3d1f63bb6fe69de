//! Launches of hyper-connections: weights of residual streams, and what is read of and written to them.

use larder_model::{ManifoldWeights, StreamMix};

use super::{Launches, THREADS, WARPS};
use crate::driver::Argument;
use crate::error::Result;

/// Where rows of weights have no matrix, as kernels read it.
const NO_MATRIX: u32 = u32::MAX;

impl Launches {
    /// The weights `[tokens, width]` of products; `base` is an address.
    pub fn stream_weights(
        &self,
        [products, base, out]: [u64; 3],
        [tokens, width, count]: [u32; 3],
        weights: &ManifoldWeights,
    ) -> Result<()> {
        let [products, base, out] = [products, base, out].map(Argument::Address);
        let [tokens_of, width, count] = [tokens, width, count].map(Argument::Word);
        let (iterations, eps) = (Argument::Word(weights.iterations.max(1) as u32), Argument::Float(weights.eps));
        let [read, write, mix] = weights.scale.map(Argument::Float);
        let arguments = [products, base, out, tokens_of, width, count, iterations, eps, read, write, mix];
        self.launch("stream_weights", [tokens.div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// The weighted sum of the streams of each token, or without weights (address 0) their mean.
    pub fn read_streams(
        &self,
        [streams, weights, out]: [u64; 3],
        [tokens, hidden, count]: [u32; 3],
        weight_stride: u32,
    ) -> Result<()> {
        let [streams, weights, out] = [streams, weights, out].map(Argument::Address);
        let shape = [tokens, hidden, count, weight_stride].map(Argument::Word);
        let arguments = [streams, weights, out, shape[0], shape[1], shape[2], shape[3]];
        self.launch("read_streams", [(tokens * hidden).div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// The streams after a part with the output `y`.
    pub fn write_streams(
        &self,
        [streams, y, mix, out]: [u64; 4],
        [tokens, hidden, count]: [u32; 3],
        (mix_stride, form): (u32, StreamMix),
    ) -> Result<()> {
        let [streams, y, mix, out] = [streams, y, mix, out].map(Argument::Address);
        let [write_at, matrix_at] = match form {
            StreamMix::Weights => [0, NO_MATRIX],
            StreamMix::Matrix => [count, 2 * count],
        };
        let shape = [tokens, hidden, count, mix_stride, write_at, matrix_at].map(Argument::Word);
        let arguments = [streams, y, mix, out, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]];
        self.launch("write_streams", [(tokens * hidden * count).div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// Values times the gates of keys and queries.
    pub fn gate_by_keys(
        &self,
        [keys, queries, values, out]: [u64; 4],
        [tokens, hidden, count]: [u32; 3],
    ) -> Result<()> {
        let [keys, queries, values, out] = [keys, queries, values, out].map(Argument::Address);
        let shape = [tokens, hidden, count].map(Argument::Word);
        let arguments = [keys, queries, values, out, shape[0], shape[1], shape[2]];
        self.launch("gate_by_keys", [(tokens * count).div_ceil(WARPS), 1], 32 * WARPS, &arguments)
    }

    /// `(y + bias) · scale + (stream + bias) · scale`; `weights` are the scale and the bias of `y`, then those of the
    /// stream.
    pub fn add_scaled_sides(
        &self,
        [stream, y, out]: [u64; 3],
        [count, hidden]: [u32; 2],
        weights: [u64; 4],
    ) -> Result<()> {
        let [stream, y, out] = [stream, y, out].map(Argument::Address);
        let [count_of, hidden] = [count, hidden].map(Argument::Word);
        let [y_scale, y_bias, stream_scale, stream_bias] = weights.map(Argument::Address);
        let arguments = [stream, y, out, count_of, hidden, y_scale, y_bias, stream_scale, stream_bias];
        self.launch("add_scaled_sides", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// `silu(x / divisor)`, or `2 · sigmoid(x / divisor)`.
    pub fn stream_gates(&self, [x, out]: [u64; 2], count: u32, divisor: f32, is_silu: bool) -> Result<()> {
        let [x, out] = [x, out].map(Argument::Address);
        let (divisor, is_silu) = (Argument::Float(divisor), Argument::Word(u32::from(is_silu)));
        let arguments = [x, out, Argument::Word(count), divisor, is_silu];
        self.launch("stream_gates", [count.div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// The mean over the streams of `sigmoid(gates) · x`.
    pub fn gated_mean(&self, [x, gates, out]: [u64; 3], [tokens, hidden, count]: [u32; 3]) -> Result<()> {
        let [x, gates, out] = [x, gates, out].map(Argument::Address);
        let shape = [tokens, hidden, count].map(Argument::Word);
        let arguments = [x, gates, out, shape[0], shape[1], shape[2]];
        self.launch("gated_mean", [(tokens * hidden).div_ceil(THREADS), 1], THREADS, &arguments)
    }
}
