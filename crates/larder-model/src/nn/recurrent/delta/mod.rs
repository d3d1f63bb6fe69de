//! Linear attention by the delta rule: what all its forms have in common. Each form is a mixer in a file of its own.

use larder_core::Rng;

use crate::error::Result;
use crate::kv::{LayerKv, LayerShape, StateLens};
use crate::nn::norm::NormWeight;
use crate::nn::{CausalConv, TokenScratch};
use crate::ops::{Activation, Decay, Delta, DeltaHeads, GateFunction, GateOrder, NormGate, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::Linear;

mod gated_delta_net;
mod kimi_delta;

pub use gated_delta_net::{DeltaForm, DeltaShape, GatedDeltaNet};
pub use kimi_delta::{KimiDelta, KimiDeltaShape};

/// What follows the matmuls of the input: a causal convolution over queries, keys and values, the delta rule, the norm
/// of each head's output, which is gated, and the output projection.
struct DeltaRule {
    heads: DeltaHeads,
    conv: CausalConv, // over queries, keys and values of all heads
    act: Activation,  // after the convolution
    norm: NormWeight, // [v_dim]
    eps: f64,
    gate: GateFunction,
    output: Linear, // [hidden, v_heads · v_dim]
}

/// The matmuls of the input, for all tokens of a step, and what decays are made of.
struct DeltaInputs<'a> {
    /// Queries, keys and values of all heads, side by side.
    qkv: &'a [Rows],
    /// `[tokens, v_heads · v_dim]`: what the output gate is made of.
    z: Rows,
    /// `[tokens, v_heads]`
    strengths: Rows,
    decay: Decay,
}

impl DeltaRule {
    /// The output `[tokens, hidden]` for the tokens of all spans.
    fn forward(
        &self,
        inputs: &DeltaInputs,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<Rows> {
        let DeltaInputs { qkv, z, strengths, decay } = *inputs;
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let qkv = self.conv.forward(qkv, &spans, Some(self.act), ops)?;
        let y = ops.delta(&Delta { heads: self.heads, qkv, strengths, decay }, &spans)?;
        let (weight, width, eps, order) = (self.norm.of(ops)?, self.heads.v_dim, self.eps, GateOrder::NormFirst);
        let y = ops.norm_gate(y, z, &NormGate { weight, width, eps, function: self.gate, order })?;
        self.output.forward(y, ops)
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.heads.state_len() }
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.fill_recurrent(tokens, self.state_lens(), rng)
    }

    /// What a mixer allocates per token that holds `products` values of the matmuls of its input, with `decays` decays.
    fn scratch(&self, hidden: usize, products: usize, decays: usize) -> TokenScratch {
        let (values, mixed) = (self.heads.values(), self.heads.mixed());
        // Input and output; the convolution's input with its window and its output, at most the whole step at once;
        // what the rule reads of a token, and its output.
        let own = 2 * hidden + 2 * mixed + self.heads.prepared(decays) + values;
        TokenScratch { floats: own + products, input: hidden.max(values) }
    }
}

#[cfg(test)]
mod tests;
