//! dots.llm1: grouped-query attention with QK norm per head, windows in late layers, DeepSeek-V3's gate.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, RoPE; sliding windows from layer max_window_layers on
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::ExpertNames;

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use super::deepseek_family::{FfnDefaults, FfnParts};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::Config;
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Rope};
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(32), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let masks = masks(config, basics.layers)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 1.0, renorm: false })?;
    let defaults = FfnDefaults { dense_layers: 0, shared_experts: 0, typed: false };
    let parts = FfnParts::parse(config, basics.layers, defaults)?;

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let norm = basics.qk_norm(weights, &own)?;
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        basics.layer(weights, &prefix, Attention { norm, mask: masks[layer], ..attention }, ffn)
    })
}

/// The mask of each layer: by `layer_types`, else a sliding window from layer `max_window_layers` on. The window is
/// there without `use_sliding_window` too, which is refused if it denies one.
fn masks(config: &mut Config, layers: usize) -> Result<Vec<AttentionMask>> {
    config.ignore(&["use_sliding_window"]);
    let first = config.count_or(&["max_window_layers"], 62)?;
    let default = if config.contains("sliding_window") { None } else { Some(4096) };
    let Some(width) = config.opt_size(&["sliding_window"])?.or(default) else {
        layer_types(config, layers, &["full_attention"])?;
        return Ok(vec![AttentionMask::Causal; layers]);
    };
    let types = layer_types(config, layers, &["full_attention", "sliding_attention"])?;
    let slides = |layer: usize| types.as_ref().map_or(layer >= first, |types| types[layer] == "sliding_attention");
    if (0..layers).any(slides) {
        config.only("use_sliding_window", true);
    }
    let mask = |layer| if slides(layer) { AttentionMask::SlidingWindow(width) } else { AttentionMask::Causal };
    Ok((0..layers).map(mask).collect())
}
