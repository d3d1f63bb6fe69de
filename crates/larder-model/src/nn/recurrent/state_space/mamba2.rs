//! Mamba 2: a state `[head_dim, state]` per head, with one decay for all of it.

use std::slice;

use larder_core::Rng;
use larder_kernels::exp;

use super::check_sizes;
use crate::config::config_error;
use crate::error::Result;
use crate::kv::{LayerKv, LayerShape, StateLens};
use crate::nn::norm::NormWeight;
use crate::nn::{CausalConv, Mixer, TokenScratch};
use crate::ops::{Activation, Constant, GateFunction, GateOrder, NormGate, Ops, Rows, Scan, ScanHeads};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, RowGroups, WeightLoader};

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
    /// Whether the matmuls of input and output have biases.
    pub bias: bool,
    /// Activation function after the convolution.
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
        if self.heads.is_multiple_of(self.groups) {
            Ok(self)
        } else {
            Err(config_error(format!("{groups} {} is not a divisor of {} heads", self.groups, self.heads)))
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
    rate_copy: Constant,
    bias_copy: Constant,
    skip_copy: Constant,
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
            rate_copy: Constant::default(),
            bias_copy: Constant::default(),
            skip_copy: Constant::default(),
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner() * self.shape.state }
    }
}

impl Mixer for Mamba2 {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let [gates, raw, steps] = Linear::forward_all([&self.gate, &self.convolved, &self.step], x, ops)?;
        let spans = states.extend_recurrent(pass, self.state_lens())?;
        let scan = Scan {
            heads: self.shape.scan(),
            convolved: self.conv.forward(&[raw], &spans, Some(self.shape.act), ops)?,
            steps,
            step_bias: self.bias_copy.of(&self.dt_bias, ops)?,
            rates: self.rate_copy.of(&self.rate, ops)?,
            skips: self.skip_copy.of(&self.skip, ops)?,
            limits: self.shape.dt_limits,
        };
        let norm = NormGate {
            weight: self.norm.of(ops)?,
            width: self.shape.inner() / self.shape.groups,
            eps: self.shape.eps,
            function: GateFunction::Silu,
            order: GateOrder::GateFirst,
        };
        let y = ops.norm_gate(ops.scan(&scan, &spans)?, gates, &norm)?;
        self.output.forward(y, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.fill_recurrent(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let (inner, channels) = (self.shape.inner(), self.shape.channels());
        // Input and output; matmuls, twice for a moment; the convolution's input with its window, and its output, at
        // most the whole step at once; steps; what is read from the states, by head and by token.
        let products = inner + channels + self.shape.heads;
        let floats = 2 * hidden + 2 * products + 2 * channels + self.shape.heads + 2 * inner;
        TokenScratch { floats, input: hidden.max(inner) }
    }
}
