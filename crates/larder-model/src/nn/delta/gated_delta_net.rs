//! Gated DeltaNet, the linear attention of Qwen3-Next: a decay per head.

use candle_core::Tensor;
use larder_core::Rng;
use larder_kernels::exp;

use super::super::activation::{sigmoid, softplus};
use super::super::{Activation, CausalConv, ForwardPass, GateFunction, LayerKv, LayerShape, Mixer, TokenScratch};
use super::{DeltaHeads, DeltaInputs, DeltaRule};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Heads, convolution and form of a Gated DeltaNet.
#[derive(Clone, Copy)]
pub struct DeltaShape {
    /// Heads and widths.
    pub heads: DeltaHeads,
    /// Width of the convolution.
    pub conv: usize,
    /// How the products of the input are stored.
    pub form: DeltaForm,
    /// The function of the output gate.
    pub gate: GateFunction,
}

/// How the products of the input are stored.
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
    input: Input,
    rates: Rates,
    decay: Vec<f32>,   // [v_heads], e^A_log
    dt_bias: Vec<f32>, // [v_heads]
}

/// The product of queries, keys, values and output gates.
enum Input {
    /// `[2 · k_heads · k_dim + 2 · v_heads · v_dim, hidden]`, grouped by key head.
    Grouped(Linear),
    /// `qkv [2 · k_heads · k_dim + v_heads · v_dim, hidden]` and `z [v_heads · v_dim, hidden]`.
    Split { qkv: Linear, z: Linear },
}

/// The products of the strength of the update and of the decay.
enum Rates {
    /// `[2 · v_heads, hidden]`, grouped by key head.
    Grouped(Linear),
    /// `[v_heads, hidden]` each.
    Separate { strength: Linear, decay: Linear },
}

impl GatedDeltaNet {
    /// Loads the tensors below `prefix`.
    pub fn new(weights: &mut WeightLoader, prefix: &str, hidden: usize, shape: DeltaShape, eps: f64) -> Result<Self> {
        let DeltaShape { heads, conv, form, gate } = shape;
        let heads @ DeltaHeads { v_heads, v_dim, .. } = heads.checked()?;
        let name = |part: &str| format!("{prefix}.{part}");
        let (keys, values) = (heads.keys(), heads.values());
        let decay = weights.vector(&name("A_log"), &[v_heads])?.into_iter().map(exp).collect();
        let mut linear = |part: &str, rows| weights.linear(&name(part), rows, hidden, false);
        let input = match form {
            DeltaForm::Grouped => Input::Grouped(linear("in_proj_qkvz", 2 * keys + 2 * values)?),
            _ => Input::Split { qkv: linear("in_proj_qkv", 2 * keys + values)?, z: linear("in_proj_z", values)? },
        };
        let rates = match form {
            DeltaForm::Separate => {
                Rates::Separate { strength: linear("in_proj_b", v_heads)?, decay: linear("in_proj_a", v_heads)? }
            }
            _ => Rates::Grouped(linear("in_proj_ba", 2 * v_heads)?),
        };
        let conv = CausalConv::new(weights, &name("conv1d"), heads.mixed(), conv, false)?;
        let dt_bias = weights.vector(&name("dt_bias"), &[v_heads])?;
        let norm = weights.vector(&name("norm.weight"), &[v_dim])?;
        let output = weights.linear(&name("out_proj"), hidden, values, false)?;
        let rule = DeltaRule { heads, conv, act: Activation::Silu, norm, eps: eps as f32, gate, output };
        Ok(GatedDeltaNet { rule, input, rates, decay, dt_bias })
    }

    /// Queries, keys, values and gates of all heads, for the tokens of `x [n, hidden]`.
    fn inputs(&self, x: &Tensor) -> Result<Inputs> {
        let heads = self.rule.heads;
        let mut inputs = Inputs::default();
        match &self.input {
            Input::Grouped(qkvz) => {
                let width = heads.mixed() + heads.values();
                with_f32(&qkvz.forward(x)?, |qkvz| {
                    qkvz.chunks_exact(width).for_each(|token| self.ungroup(token, &mut inputs))
                })?;
            }
            Input::Split { qkv, z } => {
                inputs.qkv = with_f32(&qkv.forward(x)?, <[f32]>::to_vec)?;
                inputs.z = with_f32(&z.forward(x)?, <[f32]>::to_vec)?;
            }
        }
        match &self.rates {
            Rates::Grouped(both) => with_f32(&both.forward(x)?, |both| {
                both.chunks_exact(2 * heads.v_heads).for_each(|token| self.grouped_rates(token, &mut inputs))
            })?,
            Rates::Separate { strength, decay } => {
                let [strength, decay] = Linear::forward_all([strength, decay], x)?;
                with_f32(&strength, |all| inputs.beta.extend(all.iter().map(|b| sigmoid(*b))))?;
                inputs.rate = with_f32(&decay, <[f32]>::to_vec)?;
            }
        }
        Ok(inputs)
    }

    /// Splits one token's row, which is grouped by key head, into queries, keys, values and output gates of all heads.
    fn ungroup(&self, qkvz: &[f32], out: &mut Inputs) {
        let DeltaHeads { k_heads, v_heads, k_dim, v_dim, .. } = self.rule.heads;
        let per = v_heads / k_heads;
        let groups = qkvz.chunks_exact(2 * k_dim + 2 * per * v_dim);
        for group in groups.clone() {
            out.qkv.extend_from_slice(&group[..k_dim]);
        }
        for group in groups.clone() {
            out.qkv.extend_from_slice(&group[k_dim..2 * k_dim]);
        }
        for group in groups {
            let (v, z) = group[2 * k_dim..].split_at(per * v_dim);
            out.qkv.extend_from_slice(v);
            out.z.extend_from_slice(z);
        }
    }

    /// The strength of the update and what the decay of each value head is made of, from one token's row, grouped by key head.
    fn grouped_rates(&self, ba: &[f32], out: &mut Inputs) {
        let per = self.rule.heads.v_heads / self.rule.heads.k_heads;
        for ba in ba.chunks_exact(2 * per) {
            out.beta.extend(ba[..per].iter().map(|b| sigmoid(*b)));
            out.rate.extend_from_slice(&ba[per..]);
        }
    }

    /// The decay of value head `head`, from its product.
    fn decay(&self, head: usize, rate: f32) -> f32 {
        exp(-self.decay[head] * softplus(rate + self.dt_bias[head]))
    }
}

/// Inputs of the rule for all tokens of a step, one token after the other.
#[derive(Default)]
struct Inputs {
    qkv: Vec<f32>,  // queries, keys, values of all heads
    z: Vec<f32>,    // [v_heads, v_dim]
    beta: Vec<f32>, // [v_heads]
    rate: Vec<f32>, // [v_heads]
}

impl Mixer for GatedDeltaNet {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let Inputs { qkv, z, beta, rate } = self.inputs(x)?;
        let v_heads = self.rule.heads.v_heads;
        let decay = |row: usize, head: usize, decay: &mut [f32]| {
            decay.fill(self.decay(head, rate[row * v_heads + head]));
        };
        self.rule.forward(&DeltaInputs { qkv: &qkv, z: &z, beta: &beta }, &decay, states, pass)
    }

    fn layer_shape(&self) -> LayerShape {
        self.rule.layer_shape()
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        self.rule.fill(state, tokens, rng)
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let heads = self.rule.heads;
        // All products, twice while they are put in order.
        self.rule.scratch(hidden, 2 * (heads.mixed() + heads.values() + 2 * heads.v_heads))
    }
}
