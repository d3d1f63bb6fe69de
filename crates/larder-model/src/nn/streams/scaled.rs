//! A residual addition of which both sides have a factor and a bias per channel, as ZAYA has it.

use candle_core::{Device, Tensor};

use super::{ChainedConnection, ResidualConnection};
use crate::device::{DeviceCopy, DeviceOps, DeviceRows, ScaledSides};
use crate::error::Result;
use crate::matrix::with_f32;
use crate::nn::TokenScratch;
use crate::weights::WeightLoader;

/// The connection of one part of a layer with one residual stream: `(y + bias) · scale + (stream + bias) · scale`.
pub struct ScaledConnection {
    output: ScaleAndBias,
    stream: ScaleAndBias,
}

/// Of each channel, `[hidden]`.
struct ScaleAndBias {
    scale: Vec<f32>,
    bias: Vec<f32>,
    copies: [DeviceCopy; 2],
}

impl ScaleAndBias {
    /// `name_scale [hidden]`, `name_bias [hidden]`
    fn load(weights: &mut WeightLoader, name: &str, hidden: usize) -> Result<Self> {
        let scale = weights.vector(&format!("{name}_scale"), &[hidden])?;
        let bias = weights.vector(&format!("{name}_bias"), &[hidden])?;
        Ok(ScaleAndBias { scale, bias, copies: Default::default() })
    }

    fn of(&self, channel: usize, value: f32) -> f32 {
        (value + self.bias[channel]) * self.scale[channel]
    }

    /// The ids of both on the device.
    fn on_device(&self, ops: &dyn DeviceOps) -> Result<[usize; 2]> {
        let [scale, bias] = &self.copies;
        Ok([scale.of(&self.scale, ops)?, bias.of(&self.bias, ops)?])
    }
}

impl ScaledConnection {
    /// `prefix.hidden_states_scale`, `prefix.hidden_states_bias` of the part's output; `prefix.residual_scale`,
    /// `prefix.residual_bias` of the stream.
    pub fn load(weights: &mut WeightLoader, prefix: &str, hidden: usize) -> Result<Self> {
        Ok(ScaledConnection {
            output: ScaleAndBias::load(weights, &format!("{prefix}.hidden_states"), hidden)?,
            stream: ScaleAndBias::load(weights, &format!("{prefix}.residual"), hidden)?,
        })
    }
}

impl ResidualConnection for ScaledConnection {
    fn read(&self, stream: &Tensor) -> Result<(Tensor, Vec<f32>)> {
        Ok((stream.clone(), Vec::new()))
    }

    fn write(&self, stream: Tensor, _: &[f32], y: &Tensor) -> Result<Tensor> {
        let hidden = stream.dim(1)?;
        let mut written = with_f32(&stream, <[f32]>::to_vec)?;
        with_f32(y, |y| {
            for (stream, y) in written.chunks_exact_mut(hidden).zip(y.chunks_exact(hidden)) {
                let channels = stream.iter_mut().zip(y).enumerate();
                channels.for_each(|(at, (value, y))| *value = self.output.of(at, *y) + self.stream.of(at, *value));
            }
        })?;
        Ok(Tensor::from_vec(written, stream.shape(), &Device::Cpu)?)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        TokenScratch { floats: hidden, input: hidden }
    }

    fn chained(&self) -> Option<&dyn ChainedConnection> {
        Some(self)
    }
}

impl ChainedConnection for ScaledConnection {
    fn begin_read(&self, streams: DeviceRows, _: &dyn DeviceOps) -> Result<[DeviceRows; 2]> {
        Ok([streams; 2])
    }

    fn begin_write(
        &self,
        streams: DeviceRows,
        _: DeviceRows,
        y: DeviceRows,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let sides = ScaledSides { y: self.output.on_device(ops)?, stream: self.stream.on_device(ops)? };
        ops.add_scaled_sides(streams, y, &sides)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_shifted_and_scaled_by_channel() {
        let channels = |scale: [f32; 2], bias: [f32; 2]| ScaleAndBias {
            scale: scale.into(),
            bias: bias.into(),
            copies: Default::default(),
        };
        let connection =
            ScaledConnection { output: channels([2.0, 3.0], [0.5, 0.0]), stream: channels([1.0, -1.0], [1.0, 2.0]) };
        let rows = |values: [f32; 4]| Tensor::from_vec(values.to_vec(), (2, 2), &Device::Cpu).unwrap();
        let x = rows([1.0, 2.0, 3.0, 4.0]);
        let (read, mix) = connection.read(&x).unwrap();
        assert_eq!((read.to_vec2::<f32>().unwrap(), mix), (x.to_vec2().unwrap(), vec![]));
        let written = connection.write(x, &[], &rows([1.0, 1.0, 0.0, -1.0])).unwrap();
        assert_eq!(written.to_vec2::<f32>().unwrap(), [[5.0, -1.0], [5.0, -9.0]]);
    }
}
