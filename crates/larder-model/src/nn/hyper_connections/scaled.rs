//! A residual addition of which both sides have a factor and a bias per channel, as ZAYA has it.

use crate::error::Result;
use crate::nn::{ResidualConnection, TokenScratch};
use crate::ops::{Constant, Ops, Rows, ScaledSides};
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
    copies: [Constant; 2],
}

impl ScaleAndBias {
    /// `name_scale [hidden]`, `name_bias [hidden]`
    fn load(weights: &mut WeightLoader, name: &str, hidden: usize) -> Result<Self> {
        let scale = weights.vector(&format!("{name}_scale"), &[hidden])?;
        let bias = weights.vector(&format!("{name}_bias"), &[hidden])?;
        Ok(ScaleAndBias { scale, bias, copies: Default::default() })
    }

    /// The ids of both, which these operations keep.
    fn of(&self, ops: &dyn Ops) -> Result<[usize; 2]> {
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
    fn read(&self, stream: Rows, _: &dyn Ops) -> Result<[Rows; 2]> {
        Ok([stream; 2])
    }

    fn write(&self, stream: Rows, _: Rows, y: Rows, ops: &dyn Ops) -> Result<Rows> {
        let sides = ScaledSides { y: self.output.of(ops)?, stream: self.stream.of(ops)? };
        ops.add_scaled_sides(stream, y, &sides)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        TokenScratch { floats: hidden, input: hidden }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::ComputeContext;

    #[test]
    fn both_sides_are_shifted_and_scaled_by_channel() {
        let channels = |scale: [f32; 2], bias: [f32; 2]| ScaleAndBias {
            scale: scale.into(),
            bias: bias.into(),
            copies: Default::default(),
        };
        let connection =
            ScaledConnection { output: channels([2.0, 3.0], [0.5, 0.0]), stream: channels([1.0, -1.0], [1.0, 2.0]) };
        let compute = ComputeContext::single_threaded();
        let ops = compute.ops();
        let x = ops.send(&[1.0, 2.0, 3.0, 4.0], 2).unwrap();
        let [read, mix] = connection.read(x, ops).unwrap();
        assert_eq!(read, x);
        let written = connection.write(x, mix, ops.send(&[1.0, 1.0, 0.0, -1.0], 2).unwrap(), ops).unwrap();
        assert_eq!(ops.download(&[written]).unwrap()[0][..], [5.0, -1.0, 5.0, -9.0]);
    }
}
