//! Configs of architectures with sliding windows in some of their layers.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, SOFTMAX_SCORES, keys};
use crate::source::gguf::layer_lists::{counts, layer_types, sliding_layers};

/// Divisors of frequencies from here on stand for pairs that do not turn.
const STANDS_STILL: f32 = 1e20;

pub(super) fn gemma4(hp: &Hyperparameters) -> Result<Keys> {
    let sliding = sliding_layers(hp, 6)?;
    let (width, local) = (hp.head_dim()?, hp.uint("attention.key_length_swa")?);
    if hp.uint_or("attention.value_length_swa", local)? != local {
        return Err(hp.unsupported("has keys and values of different lengths in layers with windows"));
    }
    if hp.uint_or("rope.dimension_count_swa", local)? != local || hp.uint_or("rope.dimension_count", width)? != width {
        return Err(hp.unsupported("applies RoPE to a part of each head, which its architecture does not support"));
    }
    let kv = counts(hp, "attention.head_count_kv", hp.heads()?)?;
    let own_heads = |(layer, sliding): (usize, &bool)| {
        let head_dim = if *sliding { local } else { width };
        (layer.to_string(), json!({ "head_dim": head_dim, "num_key_value_heads": kv[layer] }))
    };
    Ok(keys(json!({
        "model_type": "gemma4_text",
        "hidden_act": null,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": local,
        "num_key_value_heads": kv.first(),
        "per_layer_config": sliding.iter().enumerate().map(own_heads).collect::<Keys>(),
        "attention_k_eq_v": shares_product(hp, &sliding)?,
        "attention_bias": false,
        "layer_types": layer_types(&sliding),
        "sliding_window": hp.uint("attention.sliding_window")?,
        "rope_theta": null,
        "rope_scaling": null,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default", "rope_theta": hp.opt_float("rope.freq_base_swa")?.unwrap_or(10000.0),
            },
            "full_attention": {
                "rope_type": "proportional", "rope_theta": hp.opt_float("rope.freq_base")?.unwrap_or(10000.0),
                "partial_rotary_factor": turning_share(hp, width)?,
            },
        },
        "final_logit_softcapping": hp.opt_float("final_logit_softcapping")?.filter(|cap| *cap != 0.0),
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "num_experts": hp.uint("expert_count")?,
        "top_k_experts": hp.uint("expert_used_count")?,
        "enable_moe_block": true,
        "hidden_size_per_layer_input": hp.uint_or("embedding_length_per_layer_input", 0)?,
        "num_kv_shared_layers": hp.uint_or("attention.shared_kv_layers", 0)?,
    })))
}

/// Whether layers without windows lack a product for the values, which are then what that of the keys yields.
fn shares_product(hp: &Hyperparameters, sliding: &[bool]) -> Result<bool> {
    let full: Vec<usize> = (0..sliding.len()).filter(|layer| !sliding[*layer]).collect();
    let own = full.iter().filter(|layer| hp.has(&format!("model.layers.{layer}.self_attn.v_proj.weight"))).count();
    match own {
        0 => Ok(!full.is_empty()),
        _ if own == full.len() => Ok(false),
        _ => Err(hp.unsupported("has 'attn_v.weight' in some of its layers with full attention, and not in others")),
    }
}

/// The share of a head of `width` values that turns, by the divisors of the frequencies: 1 for pairs that turn, then
/// divisors so large that the others stand still.
fn turning_share(hp: &Hyperparameters, width: u64) -> Result<f64> {
    let Some(divisors) = hp.rope_divisors("rope_freqs.weight") else { return Ok(1.0) };
    let pairs = divisors.iter().take_while(|by| **by == 1.0).count();
    if divisors.len() as u64 != width / 2 || pairs == 0 || divisors[pairs..].iter().any(|by| *by < STANDS_STILL) {
        return Err(
            hp.unsupported("has divisors in 'rope_freqs.weight' that are not 1 for some pairs and huge for the rest")
        );
    }
    let share = 2.0 * pairs as f64 / width as f64;
    // Rounding must not lose a pair where the share is turned into pairs again.
    Ok(if (share * width as f64 / 2.0) as usize == pairs { share } else { share.next_up() })
}

pub(super) fn exaone_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    hp.whole_heads_rotate()?;
    hp.one_rope_base()?;
    Ok(keys(json!({
        "model_type": "exaone_moe",
        "head_dim": hp.head_dim()?,
        "layer_types": layer_types(&sliding_layers(hp, 4)?),
        "sliding_window": hp.uint("attention.sliding_window")?,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "num_shared_experts": hp.shared_experts()?,
        "first_k_dense_replace": hp.uint_or("leading_dense_block_count", 0)?,
        "n_group": hp.uint_or("expert_group_count", 1)?,
        "topk_group": hp.uint_or("expert_group_used_count", 1)?,
        "norm_topk_prob": hp.flag_or("expert_weights_norm", false)?,
        "routed_scaling_factor": hp.scale()?,
    })))
}

/// Layers between two without RoPE in SmallThinker models with windows; GGUF has no key for it.
const UNROTATED_EVERY: u64 = 4;

pub(super) fn smallthinker(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    let softmax = match hp.uint_or("expert_gating_func", SOFTMAX_SCORES)? {
        SOFTMAX_SCORES => true,
        SIGMOID_SCORES => false,
        other => return Err(hp.unsupported(format!("uses the unknown expert gating function {other}"))),
    };
    if hp.metadata.flags(&hp.key("attention.sliding_window_pattern")?)?.is_some() {
        return Err(hp.unsupported("has a list of layers with windows, which is not supported for smallthinker"));
    }
    let window = hp.opt_uint("attention.sliding_window")?.filter(|window| *window > 0);
    let first_of_group = |layer: u64| layer.is_multiple_of(UNROTATED_EVERY);
    let rotates = |layer| u64::from(window.is_none() || !first_of_group(layer));
    let slides = |layer| u64::from(window.is_some() && !first_of_group(layer));
    let layers = hp.layers()?;
    Ok(keys(json!({
        "model_type": "smallthinker",
        "hidden_act": null,
        "head_dim": hp.head_dim()?,
        "rope_layout": (0..layers).map(rotates).collect::<Vec<_>>(),
        "sliding_window_layout": (0..layers).map(slides).collect::<Vec<_>>(),
        "sliding_window_size": window,
        "moe_ffn_hidden_size": hp.expert_width()?,
        "moe_num_primary_experts": hp.uint("expert_count")?,
        "moe_num_active_primary_experts": hp.uint("expert_used_count")?,
        "moe_primary_router_apply_softmax": softmax,
    })))
}
