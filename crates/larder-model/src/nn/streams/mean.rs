//! The plain mean of the residual streams behind the last layer.

use candle_core::{Device, Tensor};

use super::MergeStreams;
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::with_f32;

/// Merges streams into their mean.
pub struct MeanMerge {
    /// Residual streams.
    pub streams: usize,
}

impl MergeStreams for MeanMerge {
    fn merge(&self, streams: &Tensor) -> Result<Tensor> {
        let (tokens, width) = streams.dims2()?;
        let hidden = width / self.streams;
        let mut merged = vec![0.0; tokens * hidden];
        with_f32(streams, |streams| {
            for (streams, mean) in streams.chunks_exact(width).zip(merged.chunks_exact_mut(hidden)) {
                for stream in streams.chunks_exact(hidden) {
                    mean.iter_mut().zip(stream).for_each(|(mean, value)| *mean += value);
                }
                mean.iter_mut().for_each(|mean| *mean /= self.streams as f32);
            }
        })?;
        Ok(Tensor::from_vec(merged, (tokens, hidden), &Device::Cpu)?)
    }

    fn is_on_device(&self) -> bool {
        true
    }

    fn begin(&self, streams: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        ops.read_streams(streams, self.streams, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_merged_by_token() {
        let streams = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 6.0, 0.0, 1.0, 2.0, 2.0], (2, 4), &Device::Cpu).unwrap();
        let merged = MeanMerge { streams: 2 }.merge(&streams).unwrap();
        assert_eq!(merged.to_vec2::<f32>().unwrap(), [[2.0, 4.0], [1.0, 1.5]]);
    }
}
