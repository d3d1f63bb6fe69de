//! K-EXAONE: layers with sliding windows that rotate, others without positions, DeepSeek-V3's gate.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head; sliding window and RoPE, or neither
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, layer_types, sliding_window};
use super::deepseek_family::{FfnDefaults, FfnParts};
use super::deepseek_v3::{GateDefaults, parse_gate};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Rope};
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { kv_heads: Some(32), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let sliding = sliding_layers(config, basics.layers)?;
    let window = window(config)?;
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 2.5, renorm: true })?;
    let defaults = FfnDefaults { dense_layers: 1, shared_experts: 1, typed: true };
    let parts = FfnParts::parse(config, basics.layers, defaults)?;
    let has_experts: Vec<bool> = (0..basics.layers).map(|layer| parts.sparse.contains(&layer)).collect();
    config.only("is_moe_layer", has_experts);
    config.ignore(&["first_last_k_dense_replace"]); // the reference has no use for it

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, AttentionBias::NONE, rotary)?;
        let attention = Attention {
            norm: basics.qk_norm(weights, &own)?,
            rotary: (sliding[layer] || window.is_none()).then_some(rotary),
            mask: if sliding[layer] { sliding_window(window) } else { AttentionMask::Causal },
            ..attention
        };
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        basics.layer(weights, &prefix, attention, ffn)
    })
}

/// Width of the windows; `None` for full attention with RoPE in all layers.
fn window(config: &mut Config) -> Result<Option<usize>> {
    let default = if config.contains("sliding_window") { None } else { Some(4096) };
    Ok(config.opt_size(&["sliding_window"])?.or(default))
}

/// For each layer, whether it has a sliding window: by `layer_types`, else all but every `sliding_window_pattern`-th.
fn sliding_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    if let Some(types) = layer_types(config, layers, &["sliding_attention", "full_attention"])? {
        config.ignore(&["sliding_window_pattern"]);
        return Ok(types.into_iter().map(|kind| kind == "sliding_attention").collect());
    }
    if config.contains("sliding_window") && !config.is_set("sliding_window") {
        config.ignore(&["sliding_window_pattern"]);
        return Ok(vec![false; layers]);
    }
    match config.size_or(&["sliding_window_pattern"], 4) {
        Ok(every) => Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()),
        Err(_) => Err(config_error("sliding_window_pattern is not a number, so layer_types is needed")),
    }
}

/// `gate` with the layer's correction bias, `prefix.e_score_correction_bias`.
fn with_bias(weights: &mut WeightLoader, prefix: &str, gate: &Gate) -> Result<Gate> {
    let bias = weights.vector(&format!("{prefix}.e_score_correction_bias"), &[gate.experts])?;
    Ok(Gate { bias: Some(bias), ..gate.clone() })
}
