//! Gated DeltaNet, the linear attention of Qwen3-Next: a decay per head.

use larder_core::Rng;
use larder_kernels::exp;

use super::{DeltaInputs, DeltaRule};
use crate::error::Result;
use crate::kv::{LayerKv, LayerShape};
use crate::nn::{CausalConv, Mixer, TokenScratch};
use crate::ops::{Activation, ChannelDecay, Constant, Decay, DeltaHeads, GateFunction, Ops, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, RowGroups, WeightLoader};

/// Heads, convolution and form of a Gated DeltaNet.
#[derive(Clone, Copy)]
pub struct DeltaShape {
    /// Heads and widths.
    pub heads: DeltaHeads,
    /// Width of the convolution.
    pub conv: usize,
    /// How the matmuls of the input are stored.
    pub form: DeltaForm,
    /// The function of the output gate.
    pub gate: GateFunction,
}

/// How the matmuls of the input are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeltaForm {
    /// One has queries, keys, values and output gates, and another the strengths and decays, both grouped by key head.
    Grouped,
    /// As `Grouped`, but the output gates are apart, and they and the others in the order of the heads, as in GGUF.
    SplitGates,
    /// As `SplitGates`, with strengths and decays apart too, in the order of the heads.
    Separate,
}

/// Gated DeltaNet: a recurrent state `[k_dim, v_dim]` per head, which decays and is corrected with each token.
pub struct GatedDeltaNet {
    rule: DeltaRule,
    qkv: Linear,       // [2 · k_heads · k_dim + v_heads · v_dim, hidden]
    z: Linear,         // [v_heads · v_dim, hidden], what output gates are made of
    strength: Linear,  // [v_heads, hidden]
    rate: Linear,      // [v_heads, hidden], what decays are made of
    decay: Vec<f32>,   // [v_heads], e^A_log
    dt_bias: Vec<f32>, // [v_heads]
    decay_copy: Constant,
    bias_copy: Constant,
}

impl GatedDeltaNet {
    /// Loads the tensors below `prefix`.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: DeltaShape, eps: f64) -> Result<Self> {
        let DeltaShape { heads, conv, form, gate } = shape;
        let heads @ DeltaHeads { k_heads, v_heads, k_dim, v_dim, .. } = heads.checked()?;
        let name = |part: &str| format!("{prefix}.{part}");
        let (keys, values) = (heads.keys(), heads.values());
        let decay = weights.vector(&name("A_log"), &[v_heads])?.into_iter().map(exp).collect();
        let per = v_heads / k_heads;
        let [qkv, z] = match form {
            DeltaForm::Grouped => {
                let group = 2 * k_dim + 2 * per * v_dim;
                let widths = [k_dim, k_dim, per * v_dim, per * v_dim];
                let [q, k, v, z] = RowGroups::consecutive(group, widths);
                let rows = 2 * keys + 2 * values;
                weights.linear_parts(&name("in_proj_qkvz"), rows, hidden, false, [&[q, k, v], &[z]])?
            }
            _ => [
                weights.linear(&name("in_proj_qkv"), heads.mixed(), hidden, false)?,
                weights.linear(&name("in_proj_z"), values, hidden, false)?,
            ],
        };
        let [strength, rate] = match form {
            DeltaForm::Separate => [
                weights.linear(&name("in_proj_b"), v_heads, hidden, false)?,
                weights.linear(&name("in_proj_a"), v_heads, hidden, false)?,
            ],
            _ => {
                let [strength, rate] = RowGroups::consecutive(2 * per, [per; 2]);
                weights.linear_parts(&name("in_proj_ba"), 2 * v_heads, hidden, false, [&[strength], &[rate]])?
            }
        };
        let conv = CausalConv::new(weights, &name("conv1d"), heads.mixed(), conv, false)?;
        let dt_bias = weights.vector(&name("dt_bias"), &[v_heads])?;
        let norm = weights.vector(&name("norm.weight"), &[v_dim])?.into();
        let output = weights.linear(&name("out_proj"), hidden, values, false)?;
        let rule = DeltaRule { heads, conv, act: Activation::Silu, norm, eps, gate, output };
        let (decay_copy, bias_copy) = Default::default();
        Ok(GatedDeltaNet { rule, qkv, z, strength, rate, decay, dt_bias, decay_copy, bias_copy })
    }
}

impl Mixer for GatedDeltaNet {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let products = [&self.qkv, &self.z, &self.strength, &self.rate];
        let [qkv, z, strengths, products] = Linear::forward_all(products, x, ops)?;
        let (bias, rates) = (self.bias_copy.of(&self.dt_bias, ops)?, self.decay_copy.of(&self.decay, ops)?);
        let decay = Decay { products, bias, rates, form: ChannelDecay::Softplus };
        self.rule.forward(&DeltaInputs { qkv: &[qkv], z, strengths, decay }, states, pass, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        self.rule.layer_shape()
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        self.rule.fill(state, tokens, rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let heads = self.rule.heads;
        // All matmuls, twice while they are put in order.
        self.rule.scratch(hidden, 2 * (heads.mixed() + heads.values() + 2 * heads.v_heads), heads.v_heads)
    }
}
