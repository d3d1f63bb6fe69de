//! Qwen2-MoE: biases on queries, keys and values, and a gated shared expert.
//!
//! ```text
//! x += attention(rms(x))                    biases on q, k, v; RoPE; some layers with a sliding window
//! x += Σ_k weight · expert(y) + sigmoid(gate(y)) · shared(y)      y = rms(x); softmax, top k
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, layer_types, sparse_layers};
use crate::config::Config;
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Moe, Rope, SharedExpert};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-6, kv_heads: Some(16), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let masks = masks(config, basics.layers)?;
    let bias = AttentionBias { qkv: config.flag_or("qkv_bias", true)?, o: false };
    let experts = config.size(&["num_experts", "num_local_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok"], 4)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", false)?).checked()?;
    let sparse = sparse_layers(config, basics.layers)?;
    let dense_width = config.size(&["intermediate_size"])?;
    let inter = config.size(&["moe_intermediate_size"])?;
    let shared_width = config.size(&["shared_expert_intermediate_size"])?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
        let ffn = if sparse.contains(&layer) {
            Ffn::moe(with_shared(&basics, weights, layer, gate.clone(), shared_width)?)
        } else {
            Ffn::dense(basics.mlp(weights, &format!("{prefix}.mlp"), dense_width, false)?)
        };
        basics.layer(weights, &prefix, Attention { mask: masks[layer], ..attention }, ffn)
    })
}

/// Router and experts of a layer, with a shared expert that is scaled by a gate of its own.
pub fn with_shared(basics: &Basics, weights: &mut WeightLoader, layer: usize, gate: Gate, width: usize) -> Result<Moe> {
    let prefix = format!("model.layers.{layer}.mlp");
    let moe = basics.moe(weights, layer, &format!("{prefix}.gate"), gate)?;
    let mlp = basics.mlp(weights, &format!("{prefix}.shared_expert"), width, false)?;
    let gate = Some(weights.linear(&format!("{prefix}.shared_expert_gate"), 1, basics.hidden, false)?);
    Ok(Moe { shared: Some(SharedExpert { mlp, gate }), ..moe })
}

/// The mask of each layer: by `layer_types`, else a sliding window in every other of the first `max_window_layers`
/// layers.
fn masks(config: &mut Config, layers: usize) -> Result<Vec<AttentionMask>> {
    let on = config.flag_or("use_sliding_window", false)?;
    let most = config.count_or(&["max_window_layers"], 28)?;
    let types = layer_types(config, layers, &["full_attention", "sliding_attention"])?;
    let slides = |layer: usize| match &types {
        Some(types) => types[layer] == "sliding_attention",
        None => on && layer.is_multiple_of(2) && layer < most,
    };
    if !(0..layers).any(slides) {
        config.ignore(&["sliding_window"]);
        return Ok(vec![AttentionMask::Causal; layers]);
    }
    let width = config.size_or(&["sliding_window"], 4096)?;
    Ok((0..layers)
        .map(|layer| if slides(layer) { AttentionMask::SlidingWindow(width) } else { AttentionMask::Causal })
        .collect())
}
