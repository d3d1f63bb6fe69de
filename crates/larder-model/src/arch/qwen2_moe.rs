//! Qwen2-MoE: biases on queries, keys and values, and a gated expert shared by all tokens.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Bias, Defaults, layer_types, sparse_layers};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, Moe, Rope, Shared, Visible};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { eps: 1e-6, kv_heads: Some(16), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, None)?;
    let visible = visible(c, b.layers)?;
    let bias = Bias { qkv: c.flag_or("qkv_bias", true)?, o: false };
    let experts = c.size(&["num_experts", "num_local_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 4)?;
    let gate = Gate::softmax(experts, top_k, c.flag_or("norm_topk_prob", false)?).checked()?;
    let sparse = sparse_layers(c, b.layers)?;
    let dense_width = c.size(&["intermediate_size"])?;
    let inter = c.size(&["moe_intermediate_size"])?;
    let shared_width = c.size(&["shared_expert_intermediate_size"])?;

    let geometry = b.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let attention = b.attention(w, &format!("{prefix}.self_attn"), bias, rotary)?;
        let ffn = match sparse.contains(&l) {
            true => Ffn::moe(with_shared(&b, w, l, gate.clone(), shared_width)?),
            false => Ffn::Dense(b.mlp(w, &format!("{prefix}.mlp"), dense_width, false)?),
        };
        b.layer(w, &prefix, Attention { visible: visible[l], ..attention }, ffn)
    })
}

/// Experts beside one that every token uses, scaled by a gate of its own.
pub fn with_shared(b: &Basics, w: &mut Weights, l: usize, gate: Gate, width: usize) -> Result<Moe> {
    let prefix = format!("model.layers.{l}.mlp");
    let moe = b.moe(w, l, &format!("{prefix}.gate"), gate)?;
    let mlp = b.mlp(w, &format!("{prefix}.shared_expert"), width, false)?;
    let gate = Some(w.linear(&format!("{prefix}.shared_expert_gate"), 1, b.hidden, false)?);
    Ok(Moe { shared: Some(Shared { mlp, gate }), ..moe })
}

/// Every other of the first `max_window_layers` layers slides, unless the layers are listed.
fn visible(c: &mut Config, layers: usize) -> Result<Vec<Visible>> {
    let on = c.flag_or("use_sliding_window", false)?;
    let most = c.count_or(&["max_window_layers"], 28)?;
    let types = layer_types(c, layers, &["full_attention", "sliding_attention"])?;
    let slides = |l: usize| match &types {
        Some(types) => types[l] == "sliding_attention",
        None => on && l.is_multiple_of(2) && l < most,
    };
    if !(0..layers).any(slides) {
        c.ignore(&["sliding_window"]);
        return Ok(vec![Visible::All; layers]);
    }
    let width = c.size_or(&["sliding_window"], 4096)?;
    Ok((0..layers).map(|l| if slides(l) { Visible::Window(width) } else { Visible::All }).collect())
}
