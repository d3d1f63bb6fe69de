//! Mamba 2: a state `[head_dim, state]` per head, with one decay for all of it.

use std::slice;

use candle_core::{Device, Tensor};
use larder_core::Rng;
use larder_kernels::{exp, softplus};

use super::{ScanTokens, check_sizes};
use crate::config::config_error;
use crate::device::{DeviceCopy, DeviceOps, DeviceRows, DeviceScan, GateOrder, NormGate, ScanHeads};
use crate::error::Result;
use crate::hidden::Hidden;
use crate::matrix::{Linear, with_f32};
use crate::nn::activation::{Activation, silu};
use crate::nn::norm::{NormWeight, scale};
use crate::nn::recurrent::StateValues;
use crate::nn::{
    CausalConv, ChainedMixer, ForwardPass, GateFunction, LayerKv, LayerShape, Mixer, StateLens, TokenScratch,
};
use crate::step::LayerStates;
use crate::weights::{RowGroups, WeightLoader};

/// Heads, widths and options of Mamba 2.
#[derive(Clone, Copy)]
pub struct Mamba2Shape {
    /// Heads.
    pub heads: usize,
    /// Width of a head, which is the number of its rows.
    pub head_dim: usize,
    /// Groups of heads with the same `B` and `C`, and of the norm; a divisor of `heads`.
    pub groups: usize,
    /// Values of a row of the state.
    pub state: usize,
    /// Width of the convolution.
    pub conv: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the products of input and output have biases.
    pub bias: bool,
    /// Activation function behind the convolution.
    pub act: Activation,
    /// The smallest and the largest step `dt` of time.
    pub dt_limits: [f32; 2],
    /// Added under the root of the norm.
    pub eps: f64,
}

impl Mamba2Shape {
    /// The shape, if its sizes are possible; `groups` is the key of the groups in the config.
    pub fn checked(self, groups: &str) -> Result<Self> {
        check_sizes(self.inner(), self.state, self.channels(), self.conv)?;
        match self.heads.is_multiple_of(self.groups) {
            true => Ok(self),
            false => Err(config_error(format!("{groups} {} is not a divisor of {} heads", self.groups, self.heads))),
        }
    }

    /// Heads and widths of the recurrence.
    fn scan(&self) -> ScanHeads {
        let Mamba2Shape { heads, head_dim, groups, state, .. } = *self;
        ScanHeads { heads, head_dim, groups, state }
    }

    /// Width of all heads.
    fn inner(&self) -> usize {
        self.scan().inner()
    }

    /// Channels of the convolution: `x`, `B` and `C`.
    fn channels(&self) -> usize {
        self.scan().channels()
    }
}

/// Mamba 2 (SSD): gated heads with a recurrent state.
pub struct Mamba2 {
    shape: Mamba2Shape,
    gate: Linear,      // [inner, hidden]
    convolved: Linear, // [channels, hidden]: x, B and C
    step: Linear,      // [heads, hidden]
    conv: CausalConv,
    rate: Vec<f32>,    // [heads], -e^A_log
    dt_bias: Vec<f32>, // [heads]
    skip: Vec<f32>,    // [heads]
    norm: NormWeight,  // [inner]
    output: Linear,    // [hidden, inner]
    rate_copy: DeviceCopy,
    bias_copy: DeviceCopy,
    skip_copy: DeviceCopy,
}

/// The products of the input for some tokens.
#[derive(Clone, Copy)]
struct Products<'a> {
    gates: &'a [f32], // [tokens, inner]
    raw: &'a [f32],   // [tokens, channels], what is convolved
    steps: &'a [f32], // [tokens, heads]
}

impl Mamba2 {
    /// Loads the tensors below `prefix`, for a shape that has been checked.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: Mamba2Shape) -> Result<Self> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (heads, inner) = (shape.heads, shape.inner());
        let counts = [inner, shape.channels(), heads];
        let rows = counts.iter().sum();
        let parts = RowGroups::consecutive(rows, counts);
        let parts = parts.each_ref().map(slice::from_ref);
        let [gate, convolved, step] = weights.linear_parts(&name("in_proj"), rows, hidden, shape.bias, parts)?;
        Ok(Mamba2 {
            shape,
            gate,
            convolved,
            step,
            conv: CausalConv::new(weights, &name("conv1d"), shape.channels(), shape.conv, shape.conv_bias)?,
            rate: weights.vector(&name("A_log"), &[heads])?.into_iter().map(|log| -exp(log)).collect(),
            dt_bias: weights.vector(&name("dt_bias"), &[heads])?,
            skip: weights.vector(&name("D"), &[heads])?,
            norm: weights.vector(&name("norm.weight"), &[inner])?.into(),
            output: weights.linear(&name("out_proj"), hidden, inner, shape.bias)?,
            rate_copy: DeviceCopy::default(),
            bias_copy: DeviceCopy::default(),
            skip_copy: DeviceCopy::default(),
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner() * self.shape.state }
    }

    /// Takes in tokens, given by their products with the input, and writes what they yield: `out [tokens, inner]`.
    fn advance(&self, products: &Products, values: &mut StateValues, out: &mut [f32]) {
        let (shape, inner) = (&self.shape, self.shape.inner());
        let mut convolved = self.conv.forward(products.raw, &mut values.window); // [tokens, channels]
        shape.act.apply(&mut convolved);
        let steps: Vec<f32> = products.steps.chunks_exact(shape.heads).flat_map(|row| self.steps(row)).collect();

        let tokens = ScanTokens { convolved: &convolved, steps: &steps, rates: &self.rate, skips: &self.skip };
        shape.scan().advance(&tokens, &mut values.recurrence, out, &self.output.compute().pool);
        let gates = products.gates.chunks_exact(inner);
        out.chunks_exact_mut(inner).zip(gates).for_each(|(out, gates)| self.gated_norm(out, gates));
    }

    /// The step of time of each head, from a token's products.
    fn steps<'a>(&'a self, products: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
        let [least, most] = self.shape.dt_limits;
        products.iter().zip(&self.dt_bias).map(move |(dt, bias)| softplus(dt + bias).clamp(least, most))
    }

    /// `norm · rms(x · silu(z))`, the root mean square within each group.
    fn gated_norm(&self, x: &mut [f32], z: &[f32]) {
        x.iter_mut().zip(z).for_each(|(x, z)| *x *= silu(*z));
        let width = x.len() / self.shape.groups;
        for (x, weight) in x.chunks_exact_mut(width).zip(self.norm.values().chunks_exact(width)) {
            scale(x, self.shape.eps);
            x.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
        }
    }
}

impl Mixer for Mamba2 {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let inner = self.shape.inner();
        let [gates, raw, steps] = Linear::forward_all([&self.gate, &self.convolved, &self.step], x)?;
        let [gates, raw, steps] = [gates, raw, steps].map(|rows| with_f32(&rows, <[f32]>::to_vec));
        let (gates, raw, steps) = (gates?, raw?, steps?);
        let mut out = vec![0.0; pass.tokens() * inner];
        for (i, (span, out)) in pass.split(&mut out, inner).enumerate() {
            states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |values, piece| {
                let (first, count) = (span.first_row + piece.start, piece.len());
                let products = Products {
                    gates: &gates[first * inner..][..count * inner],
                    raw: &raw[first * self.shape.channels()..][..count * self.shape.channels()],
                    steps: &steps[first * self.shape.heads..][..count * self.shape.heads],
                };
                self.advance(&products, values, &mut out[piece.start * inner..piece.end * inner]);
            })?;
        }
        self.output.forward(&Tensor::from_vec(out, (pass.tokens(), inner), &Device::Cpu)?)
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        let products = [&self.gate, &self.convolved, &self.step, &self.output];
        (!self.shape.act.is_clamped() && products.iter().all(|product| product.is_on_device())).then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let (inner, channels) = (self.shape.inner(), self.shape.channels());
        // Input and output; products, twice for a moment; the convolution's input with its window, and its output, at most the whole
        // step at once; steps; what is read from the states, by head and by token.
        let products = inner + channels + self.shape.heads;
        let floats = 2 * hidden + 2 * products + 2 * channels + self.shape.heads + 2 * inner;
        TokenScratch { floats, input: hidden.max(inner) }
    }
}

impl ChainedMixer for Mamba2 {
    fn begin(
        &self,
        x: &Hidden,
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn DeviceOps,
    ) -> Result<DeviceRows> {
        let products = Linear::begin_all([&self.gate, &self.convolved, &self.step], x.on_device(ops)?, ops)?;
        let [gates, raw, steps] = products.expect("the products are on the device");
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let scan = DeviceScan {
            heads: self.shape.scan(),
            convolved: self.conv.begin(&[raw], &spans, Some(self.shape.act), ops)?,
            steps,
            step_bias: self.bias_copy.of(&self.dt_bias, ops)?,
            rates: self.rate_copy.of(&self.rate, ops)?,
            skips: self.skip_copy.of(&self.skip, ops)?,
            limits: self.shape.dt_limits,
        };
        let norm = NormGate {
            weight: self.norm.on_device(ops)?,
            width: self.shape.inner() / self.shape.groups,
            eps: self.shape.eps,
            function: GateFunction::Silu,
            order: GateOrder::GateFirst,
        };
        let y = ops.norm_gate(ops.scan(&scan, &spans)?, gates, &norm)?;
        Ok(self.output.begin(y, ops)?.expect("the output product is on the device"))
    }
}
