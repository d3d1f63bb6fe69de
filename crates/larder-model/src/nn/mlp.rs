//! Dense gated MLPs.

use candle_core::{Device, Tensor};

use super::{Activation, TokenScratch};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::weights::WeightLoader;

/// Names of the three products of an MLP in a checkpoint.
pub struct MlpNames {
    /// `[inter, hidden]`
    pub gate: &'static str,
    /// `[inter, hidden]`
    pub up: &'static str,
    /// `[hidden, inter]`
    pub down: &'static str,
}

impl MlpNames {
    /// The names of Llama and most others.
    pub const PROJ: MlpNames = MlpNames { gate: "gate_proj", up: "up_proj", down: "down_proj" };
    /// The numbered names of Mixtral and others.
    pub const NUMBERED: MlpNames = MlpNames { gate: "w1", up: "w3", down: "w2" };
}

/// A dense gated MLP: `down(act(gate(x), up(x)))`.
pub struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    act: Activation,
}

impl Mlp {
    /// Loads the three products below `prefix`.
    pub fn new(
        weights: &mut WeightLoader,
        prefix: &str,
        names: &MlpNames,
        (hidden, inter): (usize, usize),
        act: Activation,
        bias: bool,
    ) -> Result<Self> {
        Ok(Mlp {
            gate: weights.linear(&format!("{prefix}.{}", names.gate), inter, hidden, bias)?,
            up: weights.linear(&format!("{prefix}.{}", names.up), inter, hidden, bias)?,
            down: weights.linear(&format!("{prefix}.{}", names.down), hidden, inter, bias)?,
            act,
        })
    }

    /// `x [tokens, hidden]` → same shape
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = Linear::forward_all([&self.gate, &self.up], x)?; // [tokens, inter]
        let mut combined = with_f32(&gate, <[f32]>::to_vec)?;
        with_f32(&up, |up| self.act.combine(&mut combined, up))?;
        self.down.forward(&Tensor::from_vec(combined, gate.dims(), &Device::Cpu)?)
    }

    /// What [`forward`](Self::forward) allocates per token, with its input, its output, and their sum.
    pub fn scratch(&self, hidden: usize) -> TokenScratch {
        let inter = self.down.input_width();
        TokenScratch { floats: 3 * hidden + 3 * inter, input: hidden.max(inter) }
    }
}
