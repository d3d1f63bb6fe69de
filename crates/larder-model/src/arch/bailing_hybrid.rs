//! Ling hybrid (Ling 3): Kimi Delta Attention in most layers, gated latent attention in the others, the experts of
//! DeepSeek-V3.
//!
//! ```text
//! x += kimi_delta(rms(x))                           linear attention with a decay per channel, usually bounded
//! x += sigmoid(gate) · latent_attention(rms(x))     the last layer of each group: RoPE, a gate per head
//! x += mlp(rms(x))                                  first layers
//! x += Σ_k weight · expert(y) + shared(y)           the others: y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, layer_types};
use super::deepseek_family::{FfnDefaults, FfnParts, LatentDefaults, latent_shape};
use super::deepseek_v3::{GateDefaults, parse_gate};
use super::kimi_linear::{HybridMixers, KEYS, TYPES, parse_basics};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{KimiDeltaShape, LatentShape, Rope, attention_scale};
use crate::ops::{ChannelDecay, Rotary};
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    config.also_named(KEYS);
    config.ignore(&["partial_rotary_factor"]); // the width of what rotates has a key of its own
    check_form(config);
    let basics = parse_basics(config, 1e-6)?;
    let latent = LatentShape { output: "dense", ..latent_shape(config, &basics, &LatentDefaults::COMMON)? };
    let (rope, rotary) = Rope::parse(config, latent.rope, 6e6, basics.context, None)?;
    let delta = delta_shape(config, &basics)?;
    let mixers = HybridMixers {
        linear: linear_layers(config, basics.layers)?,
        delta,
        a_log: vec![delta.heads],
        latent,
        bias: config.flag_or("attention_bias", false)?,
        rotary: Some(Rotary { interleaved: true, ..rotary }),
        scale: attention_scale(latent.nope + latent.rope, &rope),
        gated: true,
        indexers: None,
        name: "attention",
    };
    let gate = parse_gate(config, GateDefaults { groups: 8, keep: 4, scale: 2.5, renorm: true })?;
    let parts =
        FfnParts::parse(config, basics.layers, FfnDefaults { dense_layers: 2, shared_experts: 1, typed: true })?;
    check_experts(config, &parts)?;

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let mixer = mixers.mixer(weights, layer)?;
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_expert_bias, false)?;
        basics.layer_of(weights, &format!("model.layers.{layer}"), mixer, ffn)
    })
}

/// `gate` with the layer's bias for the choice, `prefix.gate.expert_bias`.
pub fn with_expert_bias(weights: &mut WeightLoader, prefix: &str, gate: &Gate) -> Result<Gate> {
    let bias = weights.vector(&format!("{prefix}.gate.expert_bias"), &[gate.experts])?;
    Ok(Gate { bias: Some(bias), ..gate.clone() })
}

/// Checks keys of published configs that the reference has in one form only.
fn check_form(config: &mut Config) {
    config.only("no_kda_lora", true);
    config.only("gated_attention_proj_granularity_type", "head_wise");
}

/// Checks keys of published configs about the experts, which the reference has at one width and without limits.
fn check_experts(config: &mut Config, parts: &FfnParts) -> Result<()> {
    for key in ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"] {
        if config.opt_numbers_or(key, 0.0)?.is_some_and(|limits| limits.iter().any(|limit| *limit != 0.0)) {
            return Err(config_error(format!("{key} has limits; they are not supported for bailing_hybrid")));
        }
    }
    let shared = parts.inter * parts.shared_experts;
    match config.count_or(&["moe_shared_expert_intermediate_size"], shared)? {
        width if width == shared || width == parts.inter => Ok(()),
        width => Err(config_error(format!(
            "moe_shared_expert_intermediate_size is {width}; only {shared}, the width of the shared experts, is supported"
        ))),
    }
}

/// Whether each layer has linear attention: by `layer_types`, else all but the last of each group.
fn linear_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let group = config.size_or(&["layer_group_size"], 6)?;
    let types = layer_types(config, layers, TYPES)?;
    let by_group = |layer: usize| !(layer + 1).is_multiple_of(group);
    Ok((0..layers).map(|layer| types.as_ref().map_or(by_group(layer), |types| types[layer] == TYPES[0])).collect())
}

/// Newer configs have the width of rotated heads as `head_dim`, and keys of their own for linear attention.
fn delta_shape(config: &mut Config, basics: &Basics) -> Result<KimiDeltaShape> {
    let (dim, conv) = (config.size_or(&["head_dim"], 128)?, config.size_or(&["short_conv_kernel_size"], 4)?);
    let bound = config.number_or("kda_lower_bound", -5.0)? as f32;
    let bounded = config.flag_or("kda_safe_gate", true)?;
    Ok(KimiDeltaShape {
        hidden: basics.hidden,
        heads: config.size_or(&["linear_num_heads"], basics.heads)?,
        dim: config.size_or(&["linear_head_dim"], dim)?,
        conv: config.size_or(&["linear_conv_kernel_dim"], conv)?,
        act: basics.act,
        low_rank: false,
        decay: if bounded { ChannelDecay::Bounded(bound) } else { ChannelDecay::Softplus },
        eps: basics.eps,
        output: "dense",
    })
}
