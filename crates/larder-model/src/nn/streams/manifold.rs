//! Manifold-constrained hyper-connections (mHC), of DeepSeek-V4 and GLM-5: how streams are read, written and mixed depends on the
//! streams themselves, and the matrix that mixes them is made doubly stochastic.

use candle_core::{Device, Tensor};
use larder_kernels::exp;

use super::{ChainedConnection, MergeStreams, ResidualConnection};
use crate::device::{DeviceCopy, DeviceOps, DeviceRows, MATRIX_STREAMS, ManifoldWeights, StreamMix};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::nn::TokenScratch;
use crate::nn::activation::sigmoid;
use crate::nn::norm::rms;
use crate::weights::WeightLoader;

/// Sizes and constants of the hyper-connections of a model.
#[derive(Clone, Copy)]
pub struct ManifoldShape {
    /// Residual streams.
    pub streams: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Normalisations of rows and columns, in turns, of which the first is of columns.
    pub iterations: usize,
    /// Added to weights and sums.
    pub eps: f32,
    /// Added under the root of the norm.
    pub norm_eps: f64,
}

/// The connection of one part of a layer.
pub struct ManifoldConnection {
    shape: ManifoldShape,
    /// `[streams · (2 + streams), streams · hidden]`: weights to read, to write, and to mix the streams.
    weights: Linear,
    /// `[streams · (2 + streams)]`
    base: Vec<f32>,
    base_copy: DeviceCopy,
    /// Of the three kinds of weights.
    scale: [f32; 3],
}

/// Merges the streams behind the last layer, with weights that depend on them.
pub struct ManifoldMerge {
    shape: ManifoldShape,
    /// `[streams, streams · hidden]`
    weights: Linear,
    /// `[streams]`
    base: Vec<f32>,
    base_copy: DeviceCopy,
    scale: f32,
}

impl ManifoldConnection {
    /// `prefix_fn [streams · (2 + streams), streams · hidden]`, `prefix_base`, `prefix_scale [3]`
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: ManifoldShape) -> Result<Self> {
        let rows = shape.streams * (2 + shape.streams);
        let product = weights.matrix(&format!("{prefix}_fn"), rows, shape.streams * shape.hidden)?;
        let base = weights.vector(&format!("{prefix}_base"), &[rows])?;
        let scale = weights.vector(&format!("{prefix}_scale"), &[3])?;
        let scale = std::array::from_fn(|kind| scale.get(kind).copied().unwrap_or_default());
        let base_copy = DeviceCopy::default();
        Ok(ManifoldConnection { shape, weights: Linear::new(product, None)?, base, base_copy, scale })
    }
}

impl ManifoldMerge {
    /// `prefix_fn [streams, streams · hidden]`, `prefix_base [streams]`, `prefix_scale [1]`
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: ManifoldShape) -> Result<Self> {
        let product = weights.matrix(&format!("{prefix}_fn"), shape.streams, shape.streams * shape.hidden)?;
        let base = weights.vector(&format!("{prefix}_base"), &[shape.streams])?;
        let scale = weights.vector(&format!("{prefix}_scale"), &[1])?.first().copied().unwrap_or_default();
        let base_copy = DeviceCopy::default();
        Ok(ManifoldMerge { shape, weights: Linear::new(product, None)?, base, base_copy, scale })
    }
}

impl ResidualConnection for ManifoldConnection {
    fn read(&self, streams: &Tensor) -> Result<(Tensor, Vec<f32>)> {
        let ManifoldShape { streams: count, hidden, norm_eps, .. } = self.shape;
        let weights = self.weights.forward(&rms(streams, norm_eps)?)?; // [tokens, count · (2 + count)]
        let (tokens, width) = weights.dims2()?;
        let mut mixes = with_f32(&weights, <[f32]>::to_vec)?;
        let mut read = vec![0.0; tokens * hidden];
        let mut mix = Vec::with_capacity(tokens * count * (1 + count));
        with_f32(streams, |streams| {
            let tokens = mixes.chunks_exact_mut(width).zip(streams.chunks_exact(count * hidden));
            for ((weights, streams), read) in tokens.zip(read.chunks_exact_mut(hidden)) {
                self.shape.finish(weights, &self.base, self.scale);
                add_streams(weights[..count].iter(), streams, read);
                mix.extend_from_slice(&weights[count..]);
            }
        })?;
        Ok((Tensor::from_vec(read, (tokens, hidden), &Device::Cpu)?, mix))
    }

    fn write(&self, streams: Tensor, mix: &[f32], y: &Tensor) -> Result<Tensor> {
        let ManifoldShape { streams: count, hidden, .. } = self.shape;
        let mut written = vec![0.0; streams.elem_count()];
        with_f32(&streams, |streams| {
            with_f32(y, |y| {
                let tokens = streams.chunks_exact(count * hidden).zip(y.chunks_exact(hidden));
                let tokens = tokens.zip(mix.chunks_exact(count * (1 + count)));
                for (((streams, y), mix), written) in tokens.zip(written.chunks_exact_mut(count * hidden)) {
                    let (post, matrix) = mix.split_at(count);
                    for (stream, out) in written.chunks_exact_mut(hidden).enumerate() {
                        add_streams(matrix[stream..].iter().step_by(count), streams, out);
                        out.iter_mut().zip(y).for_each(|(out, y)| *out += post[stream] * y);
                    }
                }
            })
        })??;
        Ok(Tensor::from_vec(written, streams.shape(), &Device::Cpu)?)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let ManifoldShape { streams, .. } = self.shape;
        // The normalised streams and what they become; what is read; the weights twice.
        let floats = 2 * streams * hidden + hidden + 2 * streams * (2 + streams);
        TokenScratch { floats, input: streams * hidden }
    }

    fn chained(&self) -> Option<&dyn ChainedConnection> {
        (self.weights.is_on_device() && self.shape.streams <= MATRIX_STREAMS).then_some(self)
    }
}

impl ManifoldShape {
    /// As [`finish_weights`], with the constants of the model.
    fn finish(&self, weights: &mut [f32], base: &[f32], scale: [f32; 3]) {
        finish_weights(weights, self.streams, (base, scale), (self.eps, self.iterations));
    }
}

/// Turns the products of one token into weights of `count` streams: of each stream to read it, and if there are more, of each stream to write
/// it, and the matrix `[from, to]` that mixes them.
pub fn finish_weights(
    weights: &mut [f32],
    count: usize,
    (base, scale): (&[f32], [f32; 3]),
    (eps, iterations): (f32, usize),
) {
    let kind = |at: usize| (at / count).min(2);
    weights.iter_mut().zip(base).enumerate().for_each(|(at, (w, base))| *w = *w * scale[kind(at)] + base);
    let (read, others) = weights.split_at_mut(count);
    read.iter_mut().for_each(|weight| *weight = sigmoid(*weight) + eps);
    if !others.is_empty() {
        let (write, matrix) = others.split_at_mut(count);
        write.iter_mut().for_each(|weight| *weight = 2.0 * sigmoid(*weight));
        balance(matrix, count, eps, iterations);
    }
}

/// Makes the sums of rows and of columns of the softmax of each row one, or nearly so.
fn balance(matrix: &mut [f32], count: usize, eps: f32, iterations: usize) {
    for row in matrix.chunks_exact_mut(count) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|value| *value = exp(*value - most));
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|value| *value = *value / sum + eps);
    }
    normalise_columns(matrix, count, eps);
    for _ in 1..iterations {
        for row in matrix.chunks_exact_mut(count) {
            let sum = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|value| *value /= sum);
        }
        normalise_columns(matrix, count, eps);
    }
}

fn normalise_columns(matrix: &mut [f32], count: usize, eps: f32) {
    for column in 0..count {
        let sum = matrix[column..].iter().step_by(count).sum::<f32>() + eps;
        matrix[column..].iter_mut().step_by(count).for_each(|value| *value /= sum);
    }
}

impl MergeStreams for ManifoldMerge {
    fn merge(&self, streams: &Tensor) -> Result<Tensor> {
        let ManifoldShape { streams: count, hidden, norm_eps, .. } = self.shape;
        let weights = self.weights.forward(&rms(streams, norm_eps)?)?; // [tokens, count]
        let mut weights = with_f32(&weights, <[f32]>::to_vec)?;
        let mut merged = vec![0.0; weights.len() / count * hidden];
        with_f32(streams, |streams| {
            let tokens = weights.chunks_exact_mut(count).zip(streams.chunks_exact(count * hidden));
            for ((weights, streams), merged) in tokens.zip(merged.chunks_exact_mut(hidden)) {
                self.shape.finish(weights, &self.base, [self.scale; 3]);
                add_streams(weights.iter(), streams, merged);
            }
        })?;
        Ok(Tensor::from_vec(merged, (weights.len() / count, hidden), &Device::Cpu)?)
    }

    fn is_on_device(&self) -> bool {
        self.weights.is_on_device()
    }

    fn begin(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let base = self.base_copy.of(&self.base, ops)?;
        let weights = self.shape.begin_weights(&self.weights, streams, (base, [self.scale; 3]), ops)?;
        ops.read_streams(streams, self.shape.streams, Some(weights))
    }
}

impl ChainedConnection for ManifoldConnection {
    fn begin_read(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<[DeviceRows; 2]> {
        let base = self.base_copy.of(&self.base, ops)?;
        let weights = self.shape.begin_weights(&self.weights, streams, (base, self.scale), ops)?;
        Ok([ops.read_streams(streams, self.shape.streams, Some(weights))?, weights])
    }

    fn begin_write(
        &self,
        streams: DeviceRows,
        mix: DeviceRows,
        y: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        ops.write_streams(streams, y, (mix, StreamMix::Matrix))
    }
}

impl ManifoldShape {
    /// The weights that depend on the streams, begun on a device that has the product.
    fn begin_weights(
        &self,
        product: &Linear,
        streams: DeviceRows,
        (base, scale): (usize, [f32; 3]),
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let normalised = ops.rms_groups(streams, 1, None, self.norm_eps)?;
        let products = product.begin(normalised, ops)?.expect("the product is on the device");
        let (eps, iterations) = (self.eps, self.iterations);
        ops.stream_weights(products, self.streams, &ManifoldWeights { scale, base, eps, iterations })
    }
}

/// Adds each of the `streams`, one behind the other, times its weight, to `sum`.
fn add_streams<'w>(weights: impl Iterator<Item = &'w f32>, streams: &[f32], sum: &mut [f32]) {
    for (weight, stream) in weights.zip(streams.chunks_exact(sum.len())) {
        sum.iter_mut().zip(stream).for_each(|(sum, value)| *sum += weight * value);
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

    const SHAPE: ManifoldShape = ManifoldShape { streams: 3, hidden: 4, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };

    fn connection() -> ManifoldConnection {
        let (rows, cols) = (15, 12);
        let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut bytes = Bytes::zeroed(values.len() * 4);
        larder_kernels::narrow(NumberFormat::F32, &values, &mut bytes);
        let compute = Arc::new(ComputeContext::single_threaded());
        let matrix = Matrix::new(NumberFormat::F32, RowOrder::Plain, rows, cols, Arc::new(bytes), compute);
        let base = (0..rows).map(|i| (i as f32).cos()).collect();
        let weights = Linear::new(matrix, None).unwrap();
        let base_copy = DeviceCopy::default();
        ManifoldConnection { shape: SHAPE, weights, base, base_copy, scale: [1.0, 0.5, 2.0] }
    }

    #[test]
    fn the_matrix_is_doubly_stochastic_and_tokens_are_independent() {
        let connection = connection();
        let streams: Vec<f32> = (0..5 * 12).map(|i| (i as f32 * 1.7).sin()).collect();
        let y: Vec<f32> = (0..5 * 4).map(|i| i as f32).collect();
        let run = |tokens: std::ops::Range<usize>| {
            let rows = |all: &[f32], width| all[tokens.start * width..tokens.end * width].to_vec();
            let x = Tensor::from_vec(rows(&streams, 12), (tokens.len(), 12), &Device::Cpu).unwrap();
            let y = Tensor::from_vec(rows(&y, 4), (tokens.len(), 4), &Device::Cpu).unwrap();
            let (read, mix) = connection.read(&x).unwrap();
            let written = connection.write(x, &mix, &y).unwrap();
            (
                read.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                mix,
                written.flatten_all().unwrap().to_vec1().unwrap(),
            )
        };
        let (read, mix, written): (_, _, Vec<f32>) = run(0..5);
        for token in mix.chunks_exact(12) {
            let matrix = &token[3..];
            for at in 0..3 {
                let (row, column) =
                    (matrix[3 * at..][..3].iter().sum::<f32>(), matrix[at..].iter().step_by(3).sum::<f32>());
                assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{row} {column}");
            }
        }
        let parts = [run(0..1), run(1..4), run(4..5)];
        assert_eq!(parts.iter().flat_map(|part| part.0.clone()).collect::<Vec<_>>(), read);
        assert_eq!(parts.iter().flat_map(|part| part.2.clone()).collect::<Vec<_>>(), written);
    }
}
