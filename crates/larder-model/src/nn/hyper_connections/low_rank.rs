//! Hyper-connections of Qwen4: a part reads a mean of the normalised streams with gates of low rank, and writes to each
//! stream by a weight that depends on them. The streams themselves pass unchanged.
//!
//! ```text
//! n = rms(streams), each apart
//! input = mean over the streams of sigmoid(up(silu(down(n) / count))) · n
//! stream i += 2 · sigmoid(inject(n)_i / count) · output
//! ```

use crate::error::Result;
use crate::nn::{MergeStreams, Norm, ResidualConnection, TokenScratch};
use crate::ops::{Ops, Rows, StreamGate, StreamMix};
use crate::weights::{Linear, WeightLoader};

/// Sizes of the hyper-connections of a model.
#[derive(Clone, Copy)]
pub struct LowRankShape {
    /// Residual streams.
    pub streams: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Rank of the gates.
    pub rank: usize,
}

/// Mixes the streams to what a part reads.
pub struct LowRankMixer {
    shape: LowRankShape,
    /// Over each stream.
    norm: Norm,
    /// `[rank, streams · hidden]`
    down: Linear,
    /// `[streams · hidden, rank]`
    up: Linear,
}

/// The connection of one part of a layer.
pub struct LowRankConnection {
    mixer: LowRankMixer,
    /// `[streams, streams · hidden]`
    inject: Linear,
}

impl LowRankMixer {
    /// `prefix.input_mix_weight_down [rank, streams · hidden]` and the like; `norm` is that over all streams.
    pub fn new(weights: &mut WeightLoader, prefix: &str, shape: LowRankShape, norm: Norm) -> Result<Self> {
        let width = shape.streams * shape.hidden;
        Ok(LowRankMixer {
            shape,
            norm: norm.of_groups(shape.hidden),
            down: weights.linear(&format!("{prefix}.input_mix_weight_down"), shape.rank, width, false)?,
            up: weights.linear(&format!("{prefix}.input_mix_weight_up"), width, shape.rank, false)?,
        })
    }

    /// The mean of `normed [tokens, streams · hidden]` with the gates that `low [tokens, rank]` leads to:
    /// `[tokens, hidden]`.
    fn mean(&self, normed: Rows, low: Rows, ops: &dyn Ops) -> Result<Rows> {
        let count = self.shape.streams;
        let gates = self.up.forward(ops.stream_gates(low, count, StreamGate::Silu)?, ops)?;
        ops.gated_mean(normed, gates, count)
    }

    fn scratch(&self) -> TokenScratch {
        let LowRankShape { streams, hidden, rank } = self.shape;
        // The normalised streams and their gates, and one of both once more; the gates of low rank twice; the mean.
        TokenScratch { floats: 3 * streams * hidden + 2 * rank + hidden + streams, input: (streams * hidden).max(rank) }
    }
}

impl MergeStreams for LowRankMixer {
    fn merge(&self, streams: Rows, ops: &dyn Ops) -> Result<Rows> {
        let normed = self.norm.forward(streams, ops)?;
        self.mean(normed, self.down.forward(normed, ops)?, ops)
    }
}

impl LowRankConnection {
    /// As [`LowRankMixer::new`], with `prefix.block_inject_weight [streams, streams · hidden]`.
    pub fn new(weights: &mut WeightLoader, prefix: &str, shape: LowRankShape, norm: Norm) -> Result<Self> {
        let width = shape.streams * shape.hidden;
        let inject = weights.linear(&format!("{prefix}.block_inject_weight"), shape.streams, width, false)?;
        Ok(LowRankConnection { mixer: LowRankMixer::new(weights, prefix, shape, norm)?, inject })
    }
}

impl ResidualConnection for LowRankConnection {
    fn read(&self, streams: Rows, ops: &dyn Ops) -> Result<[Rows; 2]> {
        let normed = self.mixer.norm.forward(streams, ops)?;
        let [low, inject] = Linear::forward_all([&self.mixer.down, &self.inject], normed, ops)?;
        let weights = ops.stream_gates(inject, self.mixer.shape.streams, StreamGate::TwiceSigmoid)?;
        Ok([self.mixer.mean(normed, low, ops)?, weights])
    }

    fn write(&self, streams: Rows, mix: Rows, y: Rows, ops: &dyn Ops) -> Result<Rows> {
        ops.write_streams(streams, y, (mix, StreamMix::Weights))
    }

    fn scratch(&self, _: usize) -> TokenScratch {
        self.mixer.scratch()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use larder_core::{NumberFormat, RowOrder};

    use super::*;
    use crate::compute::ComputeContext;
    use crate::weights::{Bytes, Matrix};

    const SHAPE: LowRankShape = LowRankShape { streams: 3, hidden: 4, rank: 2 };
    const WIDTH: usize = 12;

    fn numbers(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.71 + seed).sin()).collect()
    }

    fn linear(rows: usize, cols: usize, seed: f32) -> Linear {
        let mut bytes = Bytes::zeroed(rows * cols * 4);
        larder_kernels::narrow(NumberFormat::F32, &numbers(rows * cols, seed), &mut bytes);
        let compute = Arc::new(ComputeContext::single_threaded());
        Linear::new(Matrix::new(NumberFormat::F32, RowOrder::Plain, rows, cols, Arc::new(bytes), compute), None)
            .unwrap()
    }

    fn connection() -> LowRankConnection {
        let norm = Norm::Rms { weight: numbers(WIDTH, 0.5).into(), eps: 1e-6 }.of_groups(SHAPE.hidden);
        let mixer = LowRankMixer { shape: SHAPE, norm, down: linear(2, WIDTH, 1.0), up: linear(WIDTH, 2, 2.0) };
        LowRankConnection { mixer, inject: linear(3, WIDTH, 3.0) }
    }

    fn product(rows: usize, cols: usize, seed: f32, x: &[f64]) -> Vec<f64> {
        let weights = numbers(rows * cols, seed);
        let row = |r: usize| weights[r * cols..][..cols].iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        (0..rows).map(row).collect()
    }

    /// The mixture of the streams of a token that a part reads, and the weights of its output, by the definition.
    fn naive(streams: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let weight = numbers(WIDTH, 0.5);
        let square = |stream: &[f32]| stream.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 4.0;
        let scale = |i: usize| 1.0 / (square(&streams[i / 4 * 4..][..4]) + 1e-6).sqrt();
        let normed: Vec<f64> = (0..WIDTH).map(|i| f64::from(streams[i]) * scale(i) * f64::from(weight[i])).collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let low: Vec<f64> = product(2, WIDTH, 1.0, &normed).iter().map(|x| x / 3.0 * sigmoid(x / 3.0)).collect();
        let gates = product(WIDTH, 2, 2.0, &low);
        let read = (0..4).map(|h| (0..3).map(|s| sigmoid(gates[s * 4 + h]) * normed[s * 4 + h]).sum::<f64>() / 3.0);
        let weights = product(3, WIDTH, 3.0, &normed).iter().map(|x| 2.0 * sigmoid(x / 3.0)).collect();
        (read.collect(), weights)
    }

    #[test]
    fn what_is_read_and_written_follows_the_definition() {
        let connection = connection();
        let (streams, y) = (numbers(5 * WIDTH, 0.0), numbers(5 * 4, 9.0));
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let x = ops.send(&streams, WIDTH).unwrap();
        let [read, mix] = connection.read(x, ops).unwrap();
        let merged = connection.mixer.merge(x, ops).unwrap();
        let written = connection.write(x, mix, ops.send(&y, 4).unwrap(), ops).unwrap();
        let all = ops.download(&[read, mix, written, merged]).unwrap();
        let [read, mix, written, merged] = [0, 1, 2, 3].map(|which: usize| &all[which][..]);
        assert_eq!(merged, read);
        for (token, own) in streams.chunks(WIDTH).enumerate() {
            let (want, weights) = naive(own);
            let near = |got: &[f32], want: &[f64]| got.iter().zip(want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5);
            assert!(near(&read[token * 4..][..4], &want) && near(&mix[token * 3..][..3], &weights), "token {token}");
            let out = |i: usize| f64::from(own[i]) + weights[i / 4] * f64::from(y[token * 4 + i % 4]);
            assert!(near(&written[token * WIDTH..][..WIDTH], &(0..WIDTH).map(out).collect::<Vec<_>>()));
        }
    }
}
