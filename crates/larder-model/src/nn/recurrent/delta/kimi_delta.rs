//! Kimi Delta Attention (KDA): the delta rule with a decay per channel of the keys, and as many heads of values as of
//! keys.

use larder_core::Rng;
use larder_kernels::exp;

use super::{DeltaInputs, DeltaRule};
use crate::error::Result;
use crate::kv::{LayerKv, LayerShape};
use crate::nn::{CausalConv, Mixer, TokenScratch};
use crate::ops::{Activation, ChannelDecay, Constant, Decay, DeltaHeads, GateFunction, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, WeightLoader};

/// Heads, convolution and form of a KDA layer.
#[derive(Clone, Copy)]
pub struct KimiDeltaShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head's keys and values.
    pub dim: usize,
    /// Width of the convolutions.
    pub conv: usize,
    /// Activation function after the convolutions.
    pub act: Activation,
    /// Whether the matmuls of decay and output gate are of low rank: two matrices with `dim` values between them.
    pub low_rank: bool,
    /// How the decay follows from what its matmul yields.
    pub decay: ChannelDecay,
    /// Epsilon of the norm of each head's output.
    pub eps: f64,
    /// Name of the output projection.
    pub output: &'static str,
}

/// Kimi Delta Attention: a recurrent state `[dim, dim]` per head, whose rows decay apart and which is corrected with
/// each token.
pub struct KimiDelta {
    rule: DeltaRule,
    qkv: [Linear; 3], // [heads · dim, hidden] each
    strength: Linear, // [heads, hidden]
    decay: Factored,  // [heads · dim, hidden]
    gate: Factored,   // [heads · dim, hidden]
    form: ChannelDecay,
    rates: Vec<f32>,   // [heads], e^A_log
    dt_bias: Vec<f32>, // [heads · dim]
    rates_copy: Constant,
    bias_copy: Constant,
}

/// A matmul that may be stored as two of low rank.
struct Factored {
    first: Linear,
    second: Option<Linear>,
}

impl Factored {
    /// `prefix_proj`, or `prefix_a_proj` and `prefix_b_proj` if it is of low rank.
    fn new(weights: &mut WeightLoader, prefix: &str, shape: &KimiDeltaShape) -> Result<Self> {
        let KimiDeltaShape { hidden, heads, dim, low_rank, .. } = *shape;
        let mut linear = |part: &str, rows, cols| weights.linear(&format!("{prefix}{part}"), rows, cols, false);
        if low_rank {
            Ok(Factored { first: linear("_a_proj", dim, hidden)?, second: Some(linear("_b_proj", heads * dim, dim)?) })
        } else {
            Ok(Factored { first: linear("_proj", heads * dim, hidden)?, second: None })
        }
    }

    /// The whole matmul, from what its first matrix yielded.
    fn complete(&self, y: Rows, ops: &dyn Ops) -> Result<Rows> {
        self.second.as_ref().map_or(Ok(y), |second| second.forward(y, ops))
    }
}

impl KimiDelta {
    /// Loads the tensors below `prefix`; `a_log` is the shape of `A_log`, which has a value per head.
    pub fn new(weights: &mut WeightLoader, prefix: &str, shape: KimiDeltaShape, a_log: &[usize]) -> Result<Self> {
        let KimiDeltaShape { hidden, heads, dim, conv, act, decay: form, eps, output, .. } = shape;
        let own = DeltaHeads { k_heads: heads, v_heads: heads, k_dim: dim, v_dim: dim, tiled: false }.checked()?;
        let (name, width) = (|part: &str| format!("{prefix}.{part}"), heads * dim);
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|part| weights.linear(&name(part), width, hidden, false));
        let convs = ["q_conv1d", "k_conv1d", "v_conv1d"].map(&name);
        let rule = DeltaRule {
            heads: own,
            conv: CausalConv::joined(weights, &convs, width, conv)?,
            act,
            norm: weights.vector(&name("o_norm.weight"), &[dim])?.into(),
            eps,
            gate: GateFunction::Sigmoid,
            output: weights.linear(&name(output), hidden, width, false)?,
        };
        Ok(KimiDelta {
            rule,
            qkv: [q?, k?, v?],
            strength: weights.linear(&name("b_proj"), heads, hidden, false)?,
            decay: Factored::new(weights, &name("f"), &shape)?,
            gate: Factored::new(weights, &name("g"), &shape)?,
            form,
            rates: weights.vector(&name("A_log"), a_log)?.into_iter().map(exp).collect(),
            dt_bias: weights.vector(&name("dt_bias"), &[width])?,
            rates_copy: Constant::default(),
            bias_copy: Constant::default(),
        })
    }
}

impl Mixer for KimiDelta {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let [q, k, v] = &self.qkv;
        let products = [q, k, v, &self.strength, &self.decay.first, &self.gate.first];
        let [q, k, v, strengths, f, z] = Linear::forward_all(products, x, ops)?;
        let (products, z) = (self.decay.complete(f, ops)?, self.gate.complete(z, ops)?);
        let (bias, rates) = (self.bias_copy.of(&self.dt_bias, ops)?, self.rates_copy.of(&self.rates, ops)?);
        let decay = Decay { products, bias, rates, form: self.form };
        self.rule.forward(&DeltaInputs { qkv: &[q, k, v], z, strengths, decay }, states, pass, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        self.rule.layer_shape()
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        self.rule.fill(state, tokens, rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let DeltaHeads { v_heads, k_dim, .. } = self.rule.heads;
        let width = self.rule.heads.keys();
        // Queries, keys and values, apart and side by side; decay and gate with what is between their matrices;
        // strengths.
        self.rule.scratch(hidden, 8 * width + 2 * k_dim + 2 * v_heads, width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decays_stay_within_their_bounds() {
        for f in [-1e30f32, -30.0, -1.0, 0.0, 0.5, 30.0, 1e30] {
            let (plain, bounded) = (ChannelDecay::Softplus.of(2.0, f), ChannelDecay::Bounded(-5.0).of(2.0, f));
            assert!((0.0..=1.0).contains(&plain), "{plain}");
            assert!(((-5.0f32).exp() * 0.999..=1.0).contains(&bounded), "{bounded}");
        }
        assert!((ChannelDecay::Softplus.of(1.5, 0.0) - 0.5f32.powf(1.5)).abs() < 1e-6);
        assert!((ChannelDecay::Bounded(-5.0).of(1.5, 0.0) - (-2.5f32).exp()).abs() < 1e-6);
    }
}
