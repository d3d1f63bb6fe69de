//! Manifold-constrained hyper-connections (mHC), of DeepSeek-V4 and GLM-5: how streams are read, written and mixed
//! depends on the streams themselves, and the matrix that mixes them is made doubly stochastic.

use crate::error::Result;
use crate::nn::{MergeStreams, ResidualConnection, TokenScratch};
use crate::ops::{Constant, ManifoldWeights, Ops, Rows, StreamMix};
use crate::weights::{Linear, WeightLoader};

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
    base_copy: Constant,
    /// Of the three kinds of weights.
    scale: [f32; 3],
}

/// Merges the streams after the last layer, with weights that depend on them.
pub struct ManifoldMerge {
    shape: ManifoldShape,
    /// `[streams, streams · hidden]`
    weights: Linear,
    /// `[streams]`
    base: Vec<f32>,
    base_copy: Constant,
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
        let base_copy = Constant::default();
        Ok(ManifoldConnection { shape, weights: Linear::new(product, None)?, base, base_copy, scale })
    }
}

impl ManifoldMerge {
    /// `prefix_fn [streams, streams · hidden]`, `prefix_base [streams]`, `prefix_scale [1]`
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: ManifoldShape) -> Result<Self> {
        let product = weights.matrix(&format!("{prefix}_fn"), shape.streams, shape.streams * shape.hidden)?;
        let base = weights.vector(&format!("{prefix}_base"), &[shape.streams])?;
        let scale = weights.vector(&format!("{prefix}_scale"), &[1])?.first().copied().unwrap_or_default();
        let base_copy = Constant::default();
        Ok(ManifoldMerge { shape, weights: Linear::new(product, None)?, base, base_copy, scale })
    }
}

impl ResidualConnection for ManifoldConnection {
    fn read(&self, streams: Rows, ops: &dyn Ops) -> Result<[Rows; 2]> {
        let base = self.base_copy.of(&self.base, ops)?;
        let weights = self.shape.weights(&self.weights, streams, (base, self.scale), ops)?;
        Ok([ops.read_streams(streams, self.shape.streams, Some(weights))?, weights])
    }

    fn write(&self, streams: Rows, mix: Rows, y: Rows, ops: &dyn Ops) -> Result<Rows> {
        ops.write_streams(streams, y, (mix, StreamMix::Matrix))
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let ManifoldShape { streams, .. } = self.shape;
        // The normalised streams and what they become; what is read; the weights twice.
        let floats = 2 * streams * hidden + hidden + 2 * streams * (2 + streams);
        TokenScratch { floats, input: streams * hidden }
    }
}

impl ManifoldShape {
    /// The weights that depend on the streams.
    fn weights(
        &self,
        product: &Linear,
        streams: Rows,
        (base, scale): (usize, [f32; 3]),
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let products = product.forward(ops.rms_groups(streams, 1, None, self.norm_eps)?, ops)?;
        let (eps, iterations) = (self.eps, self.iterations);
        ops.stream_weights(products, self.streams, &ManifoldWeights { scale, base, eps, iterations })
    }
}

impl MergeStreams for ManifoldMerge {
    fn merge(&self, streams: Rows, ops: &dyn Ops) -> Result<Rows> {
        let base = self.base_copy.of(&self.base, ops)?;
        let weights = self.shape.weights(&self.weights, streams, (base, [self.scale; 3]), ops)?;
        ops.read_streams(streams, self.shape.streams, Some(weights))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use larder_core::{NumberFormat, RowOrder};

    use super::*;
    use crate::compute::ComputeContext;
    use crate::weights::{Bytes, Matrix};

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
        let base_copy = Constant::default();
        ManifoldConnection { shape: SHAPE, weights, base, base_copy, scale: [1.0, 0.5, 2.0] }
    }

    #[test]
    fn the_matrix_is_doubly_stochastic_and_tokens_are_independent() {
        let connection = connection();
        let streams: Vec<f32> = (0..5 * 12).map(|i| (i as f32 * 1.7).sin()).collect();
        let y: Vec<f32> = (0..5 * 4).map(|i| i as f32).collect();
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let run = |tokens: std::ops::Range<usize>| {
            let rows = |all: &[f32], width| ops.send(&all[tokens.start * width..tokens.end * width], width).unwrap();
            let (x, y) = (rows(&streams, 12), rows(&y, 4));
            let [read, mix] = connection.read(x, ops).unwrap();
            let written = connection.write(x, mix, y, ops).unwrap();
            ops.download(&[read, mix, written]).unwrap().iter().map(|rows| rows.to_vec()).collect::<Vec<_>>()
        };
        let [read, mix, written] = run(0..5).try_into().unwrap();
        for token in mix.chunks_exact(15) {
            let token = &token[3..];
            let matrix = &token[3..];
            for at in 0..3 {
                let (row, column) =
                    (matrix[3 * at..][..3].iter().sum::<f32>(), matrix[at..].iter().step_by(3).sum::<f32>());
                assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{row} {column}");
            }
        }
        let parts = [run(0..1), run(1..4), run(4..5)];
        assert_eq!(parts.iter().flat_map(|part| part[0].clone()).collect::<Vec<_>>(), read);
        assert_eq!(parts.iter().flat_map(|part| part[2].clone()).collect::<Vec<_>>(), written);
    }
}
