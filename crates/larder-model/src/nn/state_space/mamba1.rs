//! Mamba 1 as Jamba has it: a row of the state per channel, with a decay for each value, and norms of `dt`, `B` and `C`.

use std::ops::Range;

use candle_core::{Device, Tensor};
use larder_core::Rng;
use larder_kernels::exp;

use super::{check_sizes, take_in};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::nn::activation::{Activation, silu, softplus};
use crate::nn::parts::StateParts;
use crate::nn::{CausalConv, ForwardPass, LayerKv, LayerShape, Mixer, Norm, StateLens, TokenScratch};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Channels that one task computes.
const TASK_CHANNELS: usize = 64;

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
    input: Linear, // [2 · inner, hidden]: what is convolved, and output gates
    conv: CausalConv,
    rates: Linear, // [rank + 2 · state, inner]: dt, B, C
    dt_norm: Norm,
    b_norm: Norm,
    c_norm: Norm,
    step: Linear,     // [inner, rank]
    decays: Vec<f32>, // [inner, state], -e^A_log
    skip: Vec<f32>,   // [inner]
    output: Linear,   // [hidden, inner]
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
        Ok(Mamba1 {
            shape,
            input: weights.linear(&name("in_proj"), 2 * inner, hidden, bias)?,
            conv: CausalConv::new(weights, &name("conv1d"), inner, conv, conv_bias)?,
            rates: weights.linear(&name("x_proj"), rank + 2 * state, inner, false)?,
            dt_norm: Norm::rms(weights, &name("dt_layernorm"), rank, eps)?,
            b_norm: Norm::rms(weights, &name("b_layernorm"), state, eps)?,
            c_norm: Norm::rms(weights, &name("c_layernorm"), state, eps)?,
            step: weights.linear(&name("dt_proj"), inner, rank, true)?,
            decays: weights.vector(&name("A_log"), &[inner, state])?.into_iter().map(|log| -exp(log)).collect(),
            skip: weights.vector(&name("D"), &[inner])?,
            output: weights.linear(&name("out_proj"), hidden, inner, bias)?,
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner * self.shape.state }
    }

    /// What the recurrence gets for the tokens of `x [n, hidden]`.
    fn inputs(&self, x: &Tensor, states: &LayerStates, pass: &ForwardPass) -> Result<Inputs> {
        let Mamba1Shape { inner, state, rank, act, .. } = self.shape;
        let both = self.input.forward(x)?; // [n, 2 · inner]
        let (raw, z) = (columns(&both, 0, inner)?, columns(&both, inner, inner)?);
        let mut convolved = Vec::with_capacity(raw.len());
        for (i, span) in pass.spans.iter().enumerate() {
            let mut window = states.of(i).recurrent.window(self.state_lens())?;
            convolved.extend(self.conv.forward(span.rows(&raw, inner), &mut window));
        }
        act.apply(&mut convolved);
        let convolved = Tensor::from_vec(convolved, (pass.tokens(), inner), &Device::Cpu)?;

        let rates = self.rates.forward(&convolved)?; // [n, rank + 2 · state]
        let part = |at, width| rates.narrow(1, at, width)?.contiguous();
        let dt = self.step.forward(&self.dt_norm.forward(&part(0, rank)?)?)?; // [n, inner]
        let (b, c) = (self.b_norm.forward(&part(rank, state)?)?, self.c_norm.forward(&part(rank + state, state)?)?);
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
        let channels = StateParts { state, state_len: TASK_CHANNELS * width, out: &mut *out, width: TASK_CHANNELS };
        channels.advance(rows.len(), &self.output.compute().pool, |task, state, read| {
            self.scan(inputs, rows.clone(), task * TASK_CHANNELS, state, read);
        });
        for (out, row) in out.chunks_exact_mut(inner).zip(rows) {
            out.iter_mut().zip(&inputs.z[row * inner..]).for_each(|(y, z)| *y *= silu(*z));
        }
    }

    /// Takes in the tokens `rows` with the rows `[channels, state]` of the state from channel `first` on, and writes what is read
    /// from them: `read [rows, channels]`.
    fn scan(&self, inputs: &Inputs, rows: Range<usize>, first: usize, state: &mut [f32], read: &mut [f32]) {
        let Mamba1Shape { inner, state: width, .. } = self.shape;
        let channels = state.len() / width;
        for (row, read) in rows.zip(read.chunks_exact_mut(channels)) {
            let (at, b, c) = (row * inner + first, &inputs.b[row * width..], &inputs.c[row * width..]);
            let (b, c) = (&b[..width], &c[..width]);
            let tokens = inputs.convolved[at..].iter().zip(&inputs.steps[at..]);
            let rates = self.decays[first * width..].chunks_exact(width).zip(&self.skip[first..]);
            for (((m, (x, step)), (decays, skip)), y) in state.chunks_exact_mut(width).zip(tokens).zip(rates).zip(read)
            {
                m.iter_mut().zip(decays).for_each(|(m, rate)| *m *= exp(step * rate));
                *y = take_in(m, step * x, b, c) + skip * x;
            }
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

/// Some columns of `x [n, all]`, from column `at` on.
fn columns(x: &Tensor, at: usize, width: usize) -> Result<Vec<f32>> {
    with_f32(&x.narrow(1, at, width)?, <[f32]>::to_vec)
}
