//! Mamba 1 as Jamba has it: a row of the state per channel, with a decay for each value, and norms of `dt`, `B` and
//! `C`.

use std::slice;

use larder_core::Rng;
use larder_kernels::exp;

use super::check_sizes;
use crate::error::Result;
use crate::kv::{LayerKv, LayerShape, StateLens};
use crate::nn::{CausalConv, Mixer, Norm, TokenScratch};
use crate::ops::{Activation, ChannelScan, Constant, GateFunction, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, RowGroups, WeightLoader};

/// Widths and options of Mamba 1.
#[derive(Clone, Copy)]
pub struct Mamba1Shape {
    /// Channels.
    pub inner: usize,
    /// Values of a row of the state.
    pub state: usize,
    /// Width of what the steps of time are made of.
    pub rank: usize,
    /// Width of the convolution.
    pub conv: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the matmuls of input and output have biases.
    pub bias: bool,
    /// Activation function after the convolution.
    pub act: Activation,
    /// Added under the root of the norms.
    pub eps: f64,
}

/// Mamba 1 (S6): gated channels with a recurrent state.
pub struct Mamba1 {
    shape: Mamba1Shape,
    convolved: Linear, // [inner, hidden]
    gate: Linear,      // [inner, hidden]
    conv: CausalConv,
    dt: Linear, // [rank, inner]
    b: Linear,  // [state, inner]
    c: Linear,  // [state, inner]
    dt_norm: Norm,
    b_norm: Norm,
    c_norm: Norm,
    step: Linear,     // [inner, rank]
    decays: Vec<f32>, // [inner, state], -e^A_log
    skip: Vec<f32>,   // [inner]
    output: Linear,   // [hidden, inner]
    decays_copy: Constant,
    skip_copy: Constant,
}

impl Mamba1 {
    /// Loads the tensors below `prefix`.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: Mamba1Shape) -> Result<Self> {
        let Mamba1Shape { inner, state, rank, conv, conv_bias, bias, eps, .. } = shape;
        check_sizes(inner, state, inner, conv)?;
        let name = |part: &str| format!("{prefix}.{part}");
        let halves = RowGroups::consecutive(2 * inner, [inner; 2]);
        let halves = halves.each_ref().map(slice::from_ref);
        let [convolved, gate] = weights.linear_parts(&name("in_proj"), 2 * inner, hidden, bias, halves)?;
        let rows = rank + 2 * state;
        let parts = RowGroups::consecutive(rows, [rank, state, state]);
        let parts = parts.each_ref().map(slice::from_ref);
        let [dt, b, c] = weights.linear_parts(&name("x_proj"), rows, inner, false, parts)?;
        Ok(Mamba1 {
            shape,
            convolved,
            gate,
            dt,
            b,
            c,
            conv: CausalConv::new(weights, &name("conv1d"), inner, conv, conv_bias)?,
            dt_norm: Norm::rms(weights, &name("dt_layernorm"), rank, eps)?,
            b_norm: Norm::rms(weights, &name("b_layernorm"), state, eps)?,
            c_norm: Norm::rms(weights, &name("c_layernorm"), state, eps)?,
            step: weights.linear(&name("dt_proj"), inner, rank, true)?,
            decays: weights.vector(&name("A_log"), &[inner, state])?.into_iter().map(|log| -exp(log)).collect(),
            skip: weights.vector(&name("D"), &[inner])?,
            output: weights.linear(&name("out_proj"), hidden, inner, bias)?,
            decays_copy: Constant::default(),
            skip_copy: Constant::default(),
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner * self.shape.state }
    }
}

impl Mixer for Mamba1 {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let [raw, gates] = Linear::forward_all([&self.convolved, &self.gate], x, ops)?;
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let x = self.conv.forward(&[raw], &spans, Some(self.shape.act), ops)?;
        let [dt, b, c] = Linear::forward_all([&self.dt, &self.b, &self.c], x, ops)?;
        let scan = ChannelScan {
            x,
            steps: self.step.forward(self.dt_norm.forward(dt, ops)?, ops)?,
            b: self.b_norm.forward(b, ops)?,
            c: self.c_norm.forward(c, ops)?,
            rates: self.decays_copy.of(&self.decays, ops)?,
            skips: self.skip_copy.of(&self.skip, ops)?,
        };
        let y = ops.scan_channels(&scan, &spans)?;
        self.output.forward(ops.gate(y, gates, GateFunction::Silu, self.shape.inner)?, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.fill_recurrent(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let Mamba1Shape { inner, state, rank, .. } = self.shape;
        // Input and output; what their matmuls yield, and the two parts apart; what is convolved, with the
        // convolution's input and output; the rates, apart and normalised; the steps and their product; what is read
        // from the states, by task and by token.
        let (both, convolved, rates) = (4 * inner, 3 * inner, 3 * (rank + 2 * state));
        let floats = 2 * hidden + both + convolved + rates + 2 * inner + 2 * inner;
        TokenScratch { floats, input: hidden.max(inner) }
    }
}
