//! Dense MLPs.

use super::TokenScratch;
use crate::error::Result;
use crate::ops::{Activation, Ops, Rows};
use crate::weights::{Linear, RowGroups, WeightLoader};

/// Names of the three matmuls of an MLP in a checkpoint.
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

/// A dense MLP: `down(act(gate(x), up(x)))`, or without a gate `down(act(up(x)))`.
pub struct Mlp {
    first: First,
    down: Linear,
    act: Activation,
}

/// The matmuls of gate and up.
enum First {
    /// Each `[inter, hidden]`.
    Gated(Linear, Linear),
    /// `[inter, hidden]`: up, without a gate.
    Up(Linear),
}

impl Mlp {
    /// Loads the three matmuls below `prefix`.
    pub fn new(
        weights: &mut WeightLoader,
        prefix: &str,
        names: &MlpNames,
        (hidden, inter): (usize, usize),
        act: Activation,
        bias: bool,
    ) -> Result<Self> {
        let gate = weights.linear(&format!("{prefix}.{}", names.gate), inter, hidden, bias)?;
        let up = weights.linear(&format!("{prefix}.{}", names.up), inter, hidden, bias)?;
        let down = weights.linear(&format!("{prefix}.{}", names.down), hidden, inter, bias)?;
        Ok(Mlp { first: First::Gated(gate, up), down, act })
    }

    /// Loads gate and up from one matrix, which has all rows of gate and then those of up, and down; they have these
    /// names below `prefix`. Without biases.
    pub fn joined(
        weights: &mut WeightLoader,
        prefix: &str,
        [first, down]: [&str; 2],
        (hidden, inter): (usize, usize),
        act: Activation,
    ) -> Result<Self> {
        let [gate, up] = RowGroups::consecutive(2 * inter, [inter; 2]);
        let name = format!("{prefix}.{first}");
        let [gate, up] = weights.linear_parts(&name, 2 * inter, hidden, false, [&[gate], &[up]])?;
        let down = weights.linear(&format!("{prefix}.{down}"), hidden, inter, false)?;
        Ok(Mlp { first: First::Gated(gate, up), down, act })
    }

    /// Loads up and down, which have these names below `prefix`; without a gate.
    pub fn ungated(
        weights: &mut WeightLoader,
        prefix: &str,
        [up, down]: [&str; 2],
        (hidden, inter): (usize, usize),
        act: Activation,
        bias: bool,
    ) -> Result<Self> {
        let first = First::Up(weights.linear(&format!("{prefix}.{up}"), inter, hidden, bias)?);
        let down = weights.linear(&format!("{prefix}.{down}"), hidden, inter, bias)?;
        Ok(Mlp { first, down, act })
    }

    /// `x [tokens, hidden]` → same shape
    pub fn forward(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        let inner = match &self.first {
            First::Gated(gate, up) => {
                let [gate, up] = Linear::forward_all([gate, up], x, ops)?;
                ops.combine(self.act, gate, up)?
            }
            First::Up(up) => ops.activate(self.act, up.forward(x, ops)?)?,
        }; // [tokens, inter]
        self.down.forward(inner, ops)
    }

    /// What [`forward`](Self::forward) allocates per token, with its input, its output, and their sum.
    pub fn scratch(&self, hidden: usize) -> TokenScratch {
        let inter = self.down.input_width();
        TokenScratch { floats: 3 * hidden + 3 * inter, input: hidden.max(inter) }
    }
}
