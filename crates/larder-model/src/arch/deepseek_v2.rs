//! DeepSeek-V2: latent attention, dense layers first, then softmax-gated experts beside shared ones.

use larder_core::{ExpertGroups, ExpertNames, Gate, GroupRank, Renorm, Weighting};

use super::common::{Basics, Defaults};
use crate::config::{Config, bad};
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Latent, LatentShape, Moe, Rope, Rotary, Shared, attention_scale};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let rotary = |r: Rotary, _: &mut Config| Ok(Rotary { interleaved: true, ..r });
    let gate = |_: &mut Weights, _: &str, gate: &Gate| Ok(gate.clone());
    build_with(c, w, PARTS, rotary, parse_gate, gate)
}

/// What the reference takes where a config names nothing.
const PARTS: PartsDefaults = PartsDefaults { dense: 0, shared: 2 };

/// The model around a gate: what version 2 and version 3 have in common.
pub fn build_with(
    c: &mut Config,
    w: &mut Weights,
    defaults: PartsDefaults,
    rotary: impl Fn(Rotary, &mut Config) -> Result<Rotary>,
    parse_gate: impl Fn(&mut Config) -> Result<Gate>,
    layer_gate: impl Fn(&mut Weights, &str, &Gate) -> Result<Gate>,
) -> Result<Stack> {
    c.ignore(&["qk_head_dim"]); // always the sum of its parts
    let b = Basics::parse(c, "rms_norm_eps", Defaults { eps: 1e-6, ..Defaults::COMMON })?;
    let shape = LatentShape {
        hidden: b.hidden,
        heads: b.heads,
        q_rank: c.opt_size(&["q_lora_rank"])?,
        kv_rank: c.size_or(&["kv_lora_rank"], 512)?,
        nope: c.size_or(&["qk_nope_head_dim"], 128)?,
        rope: c.size_or(&["qk_rope_head_dim"], 64)?,
        value: c.size_or(&["v_head_dim"], 128)?,
    };
    let (rope, halves) = Rope::parse(c, shape.rope, 1e4, b.context, None)?;
    let rotary = rotary(halves, c)?;
    let scale = attention_scale(shape.nope + shape.rope, &rope);
    let bias = c.flag_or("attention_bias", false)?;
    let mlp_bias = c.flag_or("mlp_bias", false)?;
    let gate = parse_gate(c)?;
    let parts = Parts::parse(c, defaults)?;

    let geometry = b.geometry((parts.dense..b.layers).collect(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let mixer = Latent::new(w, &format!("{prefix}.self_attn"), shape, bias, rotary, scale)?;
        let mlp = format!("{prefix}.mlp");
        let ffn = match l < parts.dense {
            true => Ffn::Dense(b.mlp(w, &mlp, parts.dense_width, mlp_bias)?),
            false => {
                let gate = layer_gate(w, &mlp, &gate)?;
                Ffn::moe(parts.moe(&b, w, l, gate, mlp_bias)?)
            }
        };
        b.layer(w, &prefix, mixer, ffn)
    })
}

/// The feed-forward parts that the DeepSeek family and GLM lay out alike.
pub struct Parts {
    /// Layers with one MLP before those with experts.
    pub dense: usize,
    /// Width of that MLP.
    pub dense_width: usize,
    /// Width of an expert.
    pub inter: usize,
    /// Experts that every token uses, as one MLP of their joint width.
    pub shared: usize,
}

/// What an architecture's reference takes where a config names nothing.
#[derive(Clone, Copy)]
pub struct PartsDefaults {
    /// Layers with one MLP.
    pub dense: usize,
    /// Experts that every token uses.
    pub shared: usize,
}

impl Parts {
    /// From the config.
    pub fn parse(c: &mut Config, defaults: PartsDefaults) -> Result<Self> {
        match c.size_or(&["moe_layer_freq"], 1)? {
            1 => {}
            n => return Err(bad(format!("moe_layer_freq is {n}; only 1 is supported"))),
        }
        Ok(Parts {
            dense: c.count_or(&["first_k_dense_replace"], defaults.dense)?,
            dense_width: c.size(&["intermediate_size"])?,
            inter: c.size(&["moe_intermediate_size"])?,
            shared: c.count_or(&["n_shared_experts"], defaults.shared)?,
        })
    }

    /// Experts below `model.layers.l.mlp` beside the shared ones.
    pub fn moe(&self, b: &Basics, w: &mut Weights, l: usize, gate: Gate, bias: bool) -> Result<Moe> {
        let prefix = format!("model.layers.{l}.mlp");
        let moe = b.moe(w, l, &format!("{prefix}.gate"), gate)?;
        let shared = match self.shared {
            0 => None,
            n => {
                let mlp = b.mlp(w, &format!("{prefix}.shared_experts"), self.inter * n, bias)?;
                Some(Shared { mlp, gate: None })
            }
        };
        Ok(Moe { shared, ..moe })
    }
}

fn parse_gate(c: &mut Config) -> Result<Gate> {
    let experts = c.size(&["n_routed_experts", "num_experts", "num_local_experts"])?;
    let top_k = c.size(&["num_experts_per_tok"])?;
    let scale = c.number_or("routed_scaling_factor", 1.0)? as f32;
    let (count, keep) = (c.opt_size(&["n_group"])?, c.opt_size(&["topk_group"])?);
    c.ignore(&["norm_topk_prob"]); // the reference never normalises
    if let Some(other) = c.opt_text("scoring_func")?.filter(|s| *s != "softmax") {
        return Err(bad(format!("scoring_func '{other}' is not deepseek_v2's softmax")));
    }
    let groups = match (c.opt_text("topk_method")?.unwrap_or("greedy"), count, keep) {
        ("greedy", ..) => None,
        ("group_limited_greedy", Some(count), Some(keep)) => {
            Some(ExpertGroups { count, keep, rank: GroupRank::Best, masked: 0.0 })
        }
        ("group_limited_greedy", ..) => return Err(bad("group_limited_greedy needs n_group and topk_group")),
        (other, ..) => return Err(bad(format!("topk_method '{other}' is unknown for deepseek_v2"))),
    };
    let weighting = Weighting::Score { renorm: Renorm::No, scale };
    Ok(Gate { groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}
