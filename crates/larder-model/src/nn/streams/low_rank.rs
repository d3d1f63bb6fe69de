//! Hyper-connections of Qwen4: a part reads a mean of the normalised streams with gates of low rank, and writes to each stream by a
//! weight that depends on them. The streams themselves pass unchanged.
//!
//! ```text
//! n = rms(streams), each apart
//! input = mean over the streams of sigmoid(up(silu(down(n) / count))) · n
//! stream i += 2 · sigmoid(inject(n)_i / count) · output
//! ```

use candle_core::{Device, Tensor};

use super::{ChainedConnection, MergeStreams, ResidualConnection};
use crate::compute::share;
use crate::device::{DeviceCopy, DeviceOps, DeviceRows, StreamGate, StreamMix};
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
    norm_copy: DeviceCopy,
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
            norm_copy: DeviceCopy::default(),
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
                share(&self.up.compute().pool, all.zip(mean.chunks_exact_mut(hidden)), |_, ((gates, normed), mean)| {
                    for (gates, normed) in gates.chunks_exact(hidden).zip(normed.chunks_exact(hidden)) {
                        let stream = gates.iter().zip(normed);
                        mean.iter_mut().zip(stream).for_each(|(mean, (gate, x))| *mean += sigmoid(*gate) * x);
                    }
                    mean.iter_mut().for_each(|mean| *mean /= count);
                });
            })
        })??;
        Ok(Tensor::from_vec(mean, (tokens, hidden), &Device::Cpu)?)
    }

    /// Whether all of it is computed on a device.
    fn is_on_device(&self) -> bool {
        self.norm.as_rms_of_groups().is_some() && self.down.is_on_device() && self.up.is_on_device()
    }

    /// The streams behind their norm, begun on a device.
    fn begin_norm(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let (weight, eps) = self.norm.as_rms_of_groups().expect("it is for devices");
        ops.rms_groups(streams, self.shape.streams, Some(self.norm_copy.of(weight, ops)?), eps)
    }

    /// As [`mean`](Self::mean), begun on a device.
    fn begin_mean(&self, normed: DeviceRows, low: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let count = self.shape.streams;
        let low = ops.stream_gates(low, count, StreamGate::Silu)?;
        let gates = self.up.begin(low, ops)?.expect("the product is on the device");
        ops.gated_mean(normed, gates, count)
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

    fn is_on_device(&self) -> bool {
        LowRankMixer::is_on_device(self)
    }

    fn begin(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let normed = self.begin_norm(streams, ops)?;
        let low = self.down.begin(normed, ops)?.expect("the product is on the device");
        self.begin_mean(normed, low, ops)
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

    fn chained(&self) -> Option<&dyn ChainedConnection> {
        (self.mixer.is_on_device() && self.inject.is_on_device()).then_some(self)
    }
}

impl ChainedConnection for LowRankConnection {
    fn begin_read(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<[DeviceRows; 2]> {
        let normed = self.mixer.begin_norm(streams, ops)?;
        let products = Linear::begin_all([&self.mixer.down, &self.inject], normed, ops)?;
        let [low, inject] = products.expect("the products are on the device");
        let weights = ops.stream_gates(inject, self.mixer.shape.streams, StreamGate::TwiceSigmoid)?;
        Ok([self.mixer.begin_mean(normed, low, ops)?, weights])
    }

    fn begin_write(
        &self,
        streams: DeviceRows,
        mix: DeviceRows,
        y: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        ops.write_streams(streams, y, (mix, StreamMix::Weights))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use larder_core::{NumberFormat, RowOrder};

    use super::*;
    use crate::bytes::Bytes;
    use crate::compute::ComputeContext;
    use crate::matrix::Matrix;

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
        let norm_copy = DeviceCopy::default();
        let mixer =
            LowRankMixer { shape: SHAPE, norm, norm_copy, down: linear(2, WIDTH, 1.0), up: linear(WIDTH, 2, 2.0) };
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
        let tensor = |x: &[f32], width: usize| Tensor::from_slice(x, (x.len() / width, width), &Device::Cpu).unwrap();
        let values = |x: Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (read, mix) = connection.read(&tensor(&streams, WIDTH)).unwrap();
        assert_eq!(values(connection.mixer.merge(&tensor(&streams, WIDTH)).unwrap()), values(read.clone()));
        let read = values(read);
        let written = values(connection.write(tensor(&streams, WIDTH), &mix, &tensor(&y, 4)).unwrap());
        for (token, own) in streams.chunks(WIDTH).enumerate() {
            let (want, weights) = naive(own);
            let near = |got: &[f32], want: &[f64]| got.iter().zip(want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5);
            assert!(near(&read[token * 4..][..4], &want) && near(&mix[token * 3..][..3], &weights), "token {token}");
            let out = |i: usize| f64::from(own[i]) + weights[i / 4] * f64::from(y[token * 4 + i % 4]);
            assert!(near(&written[token * WIDTH..][..WIDTH], &(0..WIDTH).map(out).collect::<Vec<_>>()));
        }
    }
}
