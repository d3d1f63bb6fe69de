//! Mamba 2: a state `[head_dim, state]` per head, with one decay for all of it.

use candle_core::{Device, Tensor};
use larder_core::Rng;
use larder_kernels::exp;

use super::{check_sizes, take_in};
use crate::config::config_error;
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::nn::activation::{Activation, silu, softplus};
use crate::nn::norm::scale;
use crate::nn::parts::StateParts;
use crate::nn::recurrent::StateValues;
use crate::nn::{CausalConv, ForwardPass, LayerKv, LayerShape, Mixer, StateLens, TokenScratch};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

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

    /// Width of all heads.
    fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: `x`, `B` and `C`.
    fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Rows of the product of the input: output gates, what is convolved, and the step of each head.
    fn products(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }
}

/// Mamba 2 (SSD): gated heads with a recurrent state.
pub struct Mamba2 {
    shape: Mamba2Shape,
    input: Linear, // [products, hidden]
    conv: CausalConv,
    rate: Vec<f32>,    // [heads], -e^A_log
    dt_bias: Vec<f32>, // [heads]
    skip: Vec<f32>,    // [heads]
    norm: Vec<f32>,    // [inner]
    output: Linear,    // [hidden, inner]
}

impl Mamba2 {
    /// Loads the tensors below `prefix`, for a shape that has been checked.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: Mamba2Shape) -> Result<Self> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (heads, inner) = (shape.heads, shape.inner());
        Ok(Mamba2 {
            shape,
            input: weights.linear(&name("in_proj"), shape.products(), hidden, shape.bias)?,
            conv: CausalConv::new(weights, &name("conv1d"), shape.channels(), shape.conv, shape.conv_bias)?,
            rate: weights.vector(&name("A_log"), &[heads])?.into_iter().map(|log| -exp(log)).collect(),
            dt_bias: weights.vector(&name("dt_bias"), &[heads])?,
            skip: weights.vector(&name("D"), &[heads])?,
            norm: weights.vector(&name("norm.weight"), &[inner])?,
            output: weights.linear(&name("out_proj"), hidden, inner, shape.bias)?,
        })
    }

    fn state_lens(&self) -> StateLens {
        StateLens { window: self.conv.window_len(), recurrence: self.shape.inner() * self.shape.state }
    }

    /// Takes in tokens, given by their products with the input, and writes what they yield: `out [tokens, inner]`.
    fn advance(&self, products: &[f32], values: &mut StateValues, out: &mut [f32]) {
        let (shape, inner) = (&self.shape, self.shape.inner());
        let rows = products.chunks_exact(shape.products());
        let tokens = rows.len();
        let mut raw = Vec::with_capacity(tokens * shape.channels());
        rows.clone().for_each(|row| raw.extend_from_slice(&row[inner..][..shape.channels()]));
        let mut convolved = self.conv.forward(&raw, &mut values.window); // [tokens, channels]
        shape.act.apply(&mut convolved);
        let steps: Vec<f32> = rows.clone().flat_map(|row| self.steps(&row[inner + shape.channels()..])).collect();

        let state_len = shape.head_dim * shape.state;
        let heads = StateParts { state: &mut values.recurrence, state_len, out: &mut *out, width: shape.head_dim };
        heads.advance(tokens, &self.output.compute().pool, |head, state, read| {
            self.scan(head, &convolved, &steps, state, read);
        });
        out.chunks_exact_mut(inner).zip(rows).for_each(|(out, row)| self.gated_norm(out, &row[..inner]));
    }

    /// The step of time of each head, from a token's products.
    fn steps<'a>(&'a self, products: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
        let [least, most] = self.shape.dt_limits;
        products.iter().zip(&self.dt_bias).map(move |(dt, bias)| softplus(dt + bias).clamp(least, most))
    }

    /// Takes in tokens `[tokens, channels]` with the steps `[tokens, heads]`, with one head's `state [head_dim, state]`, and writes
    /// what is read from it: `read [tokens, head_dim]`.
    fn scan(&self, head: usize, convolved: &[f32], steps: &[f32], state: &mut [f32], read: &mut [f32]) {
        let Mamba2Shape { heads, head_dim, groups, state: width, .. } = self.shape;
        let (group, rate, skip) = (head / (heads / groups), self.rate[head], self.skip[head]);
        let tokens = convolved.chunks_exact(self.shape.channels()).zip(steps.chunks_exact(heads));
        for ((token, steps), read) in tokens.zip(read.chunks_exact_mut(head_dim)) {
            let (x, both) = token.split_at(heads * head_dim);
            let (b, c) = both.split_at(groups * width);
            let (b, c) = (&b[group * width..][..width], &c[group * width..][..width]);
            let step = steps[head];
            let decay = exp(step * rate);
            let rows = state.chunks_exact_mut(width).zip(&x[head * head_dim..][..head_dim]);
            for ((row, x), y) in rows.zip(read) {
                row.iter_mut().for_each(|m| *m *= decay);
                *y = take_in(row, step * x, b, c) + skip * x;
            }
        }
    }

    /// `norm · rms(x · silu(z))`, the root mean square within each group.
    fn gated_norm(&self, x: &mut [f32], z: &[f32]) {
        x.iter_mut().zip(z).for_each(|(x, z)| *x *= silu(*z));
        let width = x.len() / self.shape.groups;
        for (x, weight) in x.chunks_exact_mut(width).zip(self.norm.chunks_exact(width)) {
            scale(x, self.shape.eps);
            x.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
        }
    }
}

impl Mixer for Mamba2 {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let (inner, width) = (self.shape.inner(), self.shape.products());
        let products = self.input.forward(x)?;
        let mut out = vec![0.0; pass.tokens() * inner];
        with_f32(&products, |products| {
            pass.split(&mut out, inner).enumerate().try_for_each(|(i, (span, out))| {
                let products = span.rows(products, width);
                states.of_mut(i).recurrent.advance(span.tokens, self.state_lens(), |values, piece| {
                    let (from, to) = (piece.start, piece.end);
                    self.advance(&products[from * width..to * width], values, &mut out[from * inner..to * inner]);
                })
            })
        })??;
        self.output.forward(&Tensor::from_vec(out, (pass.tokens(), inner), &Device::Cpu)?)
    }

    fn layer_shape(&self) -> LayerShape {
        LayerShape::recurrent(self.state_lens())
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        state.recurrent.fill(tokens, self.state_lens(), rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let (inner, channels) = (self.shape.inner(), self.shape.channels());
        // Input and output; products; the convolution's input, also with its window, and its output, at most the whole step at once;
        // steps; what is read from the states, by head and by token.
        let floats = 2 * hidden + self.shape.products() + 3 * channels + self.shape.heads + 2 * inner;
        TokenScratch { floats, input: hidden.max(inner) }
    }
}
