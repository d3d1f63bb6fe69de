//! Linear attention by the delta rule: what all its forms have in common. Each form is a mixer in a file of its own.

use candle_core::{Device, Tensor};
use larder_core::Rng;

use super::norm::{NormWeight, rms_row};
use super::{Activation, CausalConv, ForwardPass, GateFunction, LayerKv, LayerShape, StateLens, TokenScratch};
use crate::device::{DeviceDecay, DeviceDelta, DeviceOps, DeviceRows, GateOrder, NormGate};
use crate::error::Result;
use crate::matrix::Linear;
use crate::step::LayerStates;

mod gated_delta_net;
mod kimi_delta;
mod recurrence;

pub use gated_delta_net::{DeltaForm, DeltaShape, GatedDeltaNet};
pub use kimi_delta::{ChannelDecay, KimiDelta, KimiDeltaShape};
pub use recurrence::DeltaHeads;
pub(crate) use recurrence::DeltaTokens;
use recurrence::HeadRow;

/// What follows the products of the input: a causal convolution over queries, keys and values, the delta rule, the norm of
/// each head's output, which is gated, and the output product.
struct DeltaRule {
    heads: DeltaHeads,
    conv: CausalConv, // over queries, keys and values of all heads
    act: Activation,  // behind the convolution
    norm: NormWeight, // [v_dim]
    eps: f64,
    gate: GateFunction,
    output: Linear, // [hidden, v_heads · v_dim]
}

/// The products of the input, for all tokens of a step.
struct DeltaInputs<'a> {
    /// `[tokens, mixed]`: queries, keys and values of all heads.
    qkv: &'a [f32],
    /// `[tokens, v_heads · v_dim]`: what the output gate is made of.
    z: &'a [f32],
    /// `[tokens, v_heads]`: strength of each correction.
    beta: &'a [f32],
}

/// As [`DeltaInputs`], on a device, with what decays are made of.
struct ChainedInputs<'a> {
    /// Queries, keys and values of all heads, side by side.
    qkv: &'a [DeviceRows],
    z: DeviceRows,
    strengths: DeviceRows,
    decay: DeviceDecay,
}

impl DeltaRule {
    /// The output `[tokens, hidden]` for the tokens of all spans. `decay` fills the decay of a head by the token's row in the step.
    fn forward(
        &self,
        inputs: &DeltaInputs,
        decay: &HeadRow,
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        let DeltaHeads { v_heads, v_dim, .. } = self.heads;
        let (mixed, values) = (self.heads.mixed(), self.heads.values());
        let mut out = vec![0.0; pass.tokens() * values];
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |state, piece| {
                let (first, count) = (span.first_row + piece.start, piece.len());
                let mut qkv = self.conv.forward(&inputs.qkv[first * mixed..][..count * mixed], &mut state.window);
                self.act.apply(&mut qkv);
                let tokens = DeltaTokens {
                    qkv: &qkv,
                    beta: &inputs.beta[first * v_heads..][..count * v_heads],
                    decay: &|t, head, row| decay(first + t, head, row),
                    finish: &|t, head, row| {
                        self.gated_norm(row, &inputs.z[(first + t) * values + head * v_dim..][..v_dim])
                    },
                };
                let out = &mut out[first * values..][..count * values];
                self.heads.advance(&tokens, &mut state.recurrence, out, &self.output.compute().pool);
            })?;
        }
        self.output.forward(&Tensor::from_vec(out, (pass.tokens(), values), &Device::Cpu)?)
    }

    /// The RMS norm of a head's output, times its gate.
    fn gated_norm(&self, x: &mut [f32], z: &[f32]) {
        rms_row(x, self.norm.values(), self.eps);
        x.iter_mut().zip(z).for_each(|(x, z)| *x *= self.gate.of(*z));
    }

    /// Whether [`begin`](Self::begin) computes it.
    fn is_for_devices(&self) -> bool {
        !self.act.is_clamped() && self.output.is_on_device()
    }

    /// As [`forward`](Self::forward), begun on a device. The caller guarantees that it [is for devices](Self::is_for_devices).
    fn begin(
        &self,
        inputs: &ChainedInputs,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let ChainedInputs { qkv, z, strengths, decay } = *inputs;
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let qkv = self.conv.begin(qkv, &spans, Some(self.act), ops)?;
        let y = ops.delta(&DeviceDelta { heads: self.heads, qkv, strengths, decay }, &spans)?;
        let (weight, width, eps, order) = (self.norm.on_device(ops)?, self.heads.v_dim, self.eps, GateOrder::NormFirst);
        let y = ops.norm_gate(y, z, &NormGate { weight, width, eps, function: self.gate, order })?;
        Ok(self.output.begin(y, ops)?.expect("the output product is on the device"))
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.heads.state_len() }
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    /// What a mixer allocates per token that holds `products` values of the products of its input.
    fn scratch(&self, hidden: usize, products: usize) -> TokenScratch {
        let values = self.heads.values();
        // Input and output; the convolution's input with its window and its output, at most the whole step at once; the
        // output of the rule, twice while heads and tokens change places.
        TokenScratch { floats: 2 * hidden + products + 2 * self.heads.mixed() + 2 * values, input: hidden.max(values) }
    }
}

#[cfg(test)]
mod tests;
