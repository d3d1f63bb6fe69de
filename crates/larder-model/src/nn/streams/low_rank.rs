//! Hyper-connections of Qwen4: a part reads a mean of the normalised streams with gates of low rank, and writes to each stream by a
//! weight that depends on them. The streams themselves pass unchanged.
//!
//! ```text
//! n = rms(streams), each apart
//! input = mean over the streams of sigmoid(up(silu(down(n) / count))) · n
//! stream i += 2 · sigmoid(inject(n)_i / count) · output
//! ```

use candle_core::{Device, Tensor};

use super::{MergeStreams, ResidualConnection};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::nn::activation::{sigmoid, silu};
use crate::nn::{Norm, TokenScratch};
use crate::weights::WeightLoader;

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

    /// The mean of `normed [tokens, streams · hidden]` with the gates that `low [tokens, rank]` leads to: `[tokens, hidden]`.
    fn mean(&self, normed: &Tensor, low: &Tensor) -> Result<Tensor> {
        let LowRankShape { streams, hidden, .. } = self.shape;
        let count = streams as f32;
        let low = with_f32(low, |low| low.iter().map(|x| silu(x / count)).collect::<Vec<_>>())?;
        let tokens = low.len() / self.shape.rank;
        let gates = self.up.forward(&Tensor::from_vec(low, (tokens, self.shape.rank), &Device::Cpu)?)?;
        let mut mean = vec![0.0; tokens * hidden];
        with_f32(&gates, |gates| {
            with_f32(normed, |normed| {
                let all = gates.chunks_exact(streams * hidden).zip(normed.chunks_exact(streams * hidden));
                for ((gates, normed), mean) in all.zip(mean.chunks_exact_mut(hidden)) {
                    for (gates, normed) in gates.chunks_exact(hidden).zip(normed.chunks_exact(hidden)) {
                        let stream = gates.iter().zip(normed);
                        mean.iter_mut().zip(stream).for_each(|(mean, (gate, x))| *mean += sigmoid(*gate) * x);
                    }
                    mean.iter_mut().for_each(|mean| *mean /= count);
                }
            })
        })??;
        Ok(Tensor::from_vec(mean, (tokens, hidden), &Device::Cpu)?)
    }

    fn scratch(&self) -> TokenScratch {
        let LowRankShape { streams, hidden, rank } = self.shape;
        // The normalised streams and their gates, and one of both once more; the gates of low rank twice; the mean.
        TokenScratch { floats: 3 * streams * hidden + 2 * rank + hidden + streams, input: (streams * hidden).max(rank) }
    }
}

impl MergeStreams for LowRankMixer {
    fn merge(&self, streams: &Tensor) -> Result<Tensor> {
        let normed = self.norm.forward(streams)?;
        self.mean(&normed, &self.down.forward(&normed)?)
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
    fn read(&self, streams: &Tensor) -> Result<(Tensor, Vec<f32>)> {
        let normed = self.mixer.norm.forward(streams)?;
        let [low, inject] = Linear::forward_all([&self.mixer.down, &self.inject], &normed)?;
        let count = self.mixer.shape.streams as f32;
        let weights = with_f32(&inject, |all| all.iter().map(|x| 2.0 * sigmoid(x / count)).collect())?;
        Ok((self.mixer.mean(&normed, &low)?, weights))
    }

    fn write(&self, streams: Tensor, mix: &[f32], y: &Tensor) -> Result<Tensor> {
        let LowRankShape { streams: count, hidden, .. } = self.mixer.shape;
        let mut written = with_f32(&streams, <[f32]>::to_vec)?;
        with_f32(y, |y| {
            for (at, (stream, weight)) in written.chunks_exact_mut(hidden).zip(mix).enumerate() {
                let y = &y[at / count * hidden..][..hidden];
                stream.iter_mut().zip(y).for_each(|(stream, y)| *stream += y * weight);
            }
        })?;
        Ok(Tensor::from_vec(written, streams.shape(), &Device::Cpu)?)
    }

    fn scratch(&self, _: usize) -> TokenScratch {
        self.mixer.scratch()
    }
}
