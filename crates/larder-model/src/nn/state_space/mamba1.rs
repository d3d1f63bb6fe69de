//! Mamba 1 as Jamba has it: a row of the state per channel, with a decay for each value, and norms of `dt`, `B` and `C`.

use std::ops::Range;
use std::slice;

use candle_core::{Device, Tensor};
use larder_core::Rng;
use larder_kernels::{exp, softplus};

use super::{ChannelTokens, check_sizes};
use crate::device::{DeviceChannelScan, DeviceCopy, DeviceOps, DeviceRows};
use crate::error::Result;
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};
use crate::nn::activation::{Activation, silu};
use crate::nn::{
    CausalConv, ChainedMixer, ForwardPass, GateFunction, LayerKv, LayerShape, Mixer, Norm, StateLens, TokenScratch,
};
use crate::step::LayerStates;
use crate::weights::{RowGroups, WeightLoader};

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
    /// Whether the products of input and output have biases.
    pub bias: bool,
    /// Activation function behind the convolution.
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
    decays_copy: DeviceCopy,
    skip_copy: DeviceCopy,
}

/// What the recurrence gets for all tokens of a step.
struct Inputs {
    raw: Vec<f32>,       // [tokens, inner], before the convolution
    convolved: Vec<f32>, // [tokens, inner]
    steps: Vec<f32>,     // [tokens, inner]
    b: Vec<f32>,         // [tokens, state]
    c: Vec<f32>,         // [tokens, state]
    z: Vec<f32>,         // [tokens, inner]
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
            decays_copy: DeviceCopy::default(),
            skip_copy: DeviceCopy::default(),
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner * self.shape.state }
    }

    /// What the recurrence gets for the tokens of `x [n, hidden]`.
    fn inputs(&self, x: &Tensor, states: &LayerStates, pass: &ForwardPass) -> Result<Inputs> {
        let Mamba1Shape { inner, act, .. } = self.shape;
        let [raw, z] = Linear::forward_all([&self.convolved, &self.gate], x)?; // [n, inner]
        let [raw, z] = [raw, z].map(|rows| with_f32(&rows, <[f32]>::to_vec));
        let (raw, z) = (raw?, z?);
        let mut convolved = Vec::with_capacity(raw.len());
        for (i, span) in pass.spans.iter().enumerate() {
            let mut window = states.of(i).recurrent.window(self.state_lens())?;
            convolved.extend(self.conv.forward(span.rows(&raw, inner), &mut window));
        }
        act.apply(&mut convolved);
        let convolved = Tensor::from_vec(convolved, (pass.tokens(), inner), &Device::Cpu)?;

        let [dt, b, c] = Linear::forward_all([&self.dt, &self.b, &self.c], &convolved)?;
        let dt = self.step.forward(&self.dt_norm.forward(&dt)?)?; // [n, inner]
        let (b, c) = (self.b_norm.forward(&b)?, self.c_norm.forward(&c)?);
        Ok(Inputs {
            raw,
            convolved: with_f32(&convolved, <[f32]>::to_vec)?,
            steps: with_f32(&dt, |dt| dt.iter().map(|dt| softplus(*dt)).collect())?,
            b: with_f32(&b, <[f32]>::to_vec)?,
            c: with_f32(&c, <[f32]>::to_vec)?,
            z,
        })
    }

    /// Takes in the tokens `rows` of a step with the state `[inner, state]` of their sequence, and writes what they yield: `out
    /// [rows, inner]`.
    fn advance(&self, inputs: &Inputs, rows: Range<usize>, state: &mut [f32], out: &mut [f32]) {
        let Mamba1Shape { inner, state: width, .. } = self.shape;
        let Inputs { convolved: x, steps, b, c, .. } = inputs;
        let (decays, skips) = (&self.decays, &self.skip);
        let tokens = ChannelTokens { x, steps, b, c, decays, skips, channels: inner, width };
        tokens.advance(rows.clone(), state, out, &self.output.compute().pool);
        for (out, row) in out.chunks_exact_mut(inner).zip(rows) {
            out.iter_mut().zip(&inputs.z[row * inner..]).for_each(|(y, z)| *y *= silu(*z));
        }
    }
}

impl Mixer for Mamba1 {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let inner = self.shape.inner;
        let inputs = self.inputs(x, states, pass)?;
        let mut out = vec![0.0; pass.tokens() * inner];
        for (i, (span, out)) in pass.split(&mut out, inner).enumerate() {
            let raw = span.rows(&inputs.raw, inner);
            states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |values, piece| {
                let (from, to) = (piece.start, piece.end);
                self.conv.shift(&raw[from * inner..to * inner], &mut values.window);
                let rows = span.first_row + from..span.first_row + to;
                self.advance(&inputs, rows, &mut values.recurrence, &mut out[from * inner..to * inner]);
            })?;
        }
        self.output.forward(&Tensor::from_vec(out, (pass.tokens(), inner), &Device::Cpu)?)
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        let products = [&self.convolved, &self.gate, &self.dt, &self.b, &self.c, &self.step, &self.output];
        let all = products.iter().all(|product| product.is_on_device());
        (all && !self.shape.act.is_clamped()).then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let Mamba1Shape { inner, state, rank, .. } = self.shape;
        // Input and output; their products, and the two parts apart; what is convolved, with the convolution's input and output;
        // the rates, apart and normalised; the steps and their product; what is read from the states, by task and by token.
        let (both, convolved, rates) = (4 * inner, 3 * inner, 3 * (rank + 2 * state));
        let floats = 2 * hidden + both + convolved + rates + 2 * inner + 2 * inner;
        TokenScratch { floats, input: hidden.max(inner) }
    }
}

impl ChainedMixer for Mamba1 {
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let on_device = "the products are on the device";
        let products = Linear::begin_all([&self.convolved, &self.gate], x.on_device(ops)?, ops)?;
        let [raw, gates] = products.expect(on_device);
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let x = self.conv.begin(&[raw], &spans, Some(self.shape.act), ops)?;
        let [dt, b, c] = Linear::begin_all([&self.dt, &self.b, &self.c], x, ops)?.expect(on_device);
        let norm = |norm: &Norm, x| norm.for_devices().expect("it is for devices").begin(x, ops);
        let scan = DeviceChannelScan {
            x,
            steps: self.step.begin(norm(&self.dt_norm, dt)?, ops)?.expect(on_device),
            b: norm(&self.b_norm, b)?,
            c: norm(&self.c_norm, c)?,
            rates: self.decays_copy.of(&self.decays, ops)?,
            skips: self.skip_copy.of(&self.skip, ops)?,
        };
        let y = ops.scan_channels(&scan, &spans)?;
        let y = ops.gate(y, gates, GateFunction::Silu, self.shape.inner)?;
        Ok(self.output.begin(y, ops)?.expect(on_device))
    }
}
