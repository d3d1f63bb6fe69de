//! A model's config in the keys of the Hugging Face hub, from the metadata of a GGUF file.
//!
//! What the metadata leave out gets the value with which llama.cpp runs the architecture.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    facts::{Facts, Keys, keys},
    metadata::Metadata,
    names::View,
};
use crate::error::{Result, StoreError};

/// The numbers by which GGUF names the scores of a router.
const SOFTMAX_SCORES: u64 = 1;
const SIGMOID_SCORES: u64 = 2;

/// The config of a model of `architecture`, whose tensors have the hub's names.
pub(super) fn hub_config(metadata: &Metadata, views: &HashMap<String, View>) -> Result<Value> {
    let facts = Facts::of(metadata, views);
    let arch = metadata.architecture()?;
    let own = match arch {
        "llama" => mixtral(&facts)?,
        "qwen2moe" => qwen2_moe(&facts)?,
        "qwen3moe" => qwen3_moe(&facts)?,
        "olmoe" => olmoe(&facts)?,
        "gpt-oss" => gpt_oss(&facts)?,
        "glm4moe" => glm4_moe(&facts)?,
        "granitemoe" => granite_moe(&facts)?,
        "deepseek2" => deepseek(&facts)?,
        "ernie4_5-moe" => ernie(&facts)?,
        "lfm2moe" => lfm2_moe(&facts)?,
        other => return Err(facts.unsupported(format!("is of the architecture '{other}', which is not known"))),
    };
    let mut config = facts.common()?;
    // The keys of the architecture overrule the common ones; null takes a common one out.
    config.extend(own);
    config.retain(|_, value| !value.is_null());
    Ok(Value::Object(config))
}

fn mixtral(f: &Facts) -> Result<Keys> {
    f.whole_heads_rotate()?;
    Ok(keys(json!({
        "model_type": "mixtral",
        "head_dim": f.unusual_head_dim()?,
        "intermediate_size": f.expert_width()?,
        "num_local_experts": f.uint("expert_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "sliding_window": f.opt_uint("attention.sliding_window")?.filter(|w| *w > 0),
    })))
}

fn qwen2_moe(f: &Facts) -> Result<Keys> {
    f.usual_head_dim()?;
    let mut own = f.qwen("qwen2_moe", false)?;
    let width = f.uint_or("expert_shared_feed_forward_length", f.uint("feed_forward_length")?)?;
    own.insert("shared_expert_intermediate_size".into(), width.into());
    own.insert("qkv_bias".into(), f.has("model.layers.0.self_attn.q_proj.bias").into());
    Ok(own)
}

fn qwen3_moe(f: &Facts) -> Result<Keys> {
    let mut own = f.qwen("qwen3_moe", true)?;
    own.insert("head_dim".into(), f.head_dim()?.into());
    own.insert("attention_bias".into(), false.into());
    Ok(own)
}

fn olmoe(f: &Facts) -> Result<Keys> {
    f.usual_head_dim()?;
    Ok(keys(json!({
        "model_type": "olmoe",
        "intermediate_size": f.expert_width()?,
        "num_experts": f.uint("expert_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "norm_topk_prob": f.flag_or("expert_weights_norm", false)?,
        "clip_qkv": f.opt_float("attention.clamp_kqv")?.filter(|c| *c > 0.0),
        "attention_bias": false,
    })))
}

fn gpt_oss(f: &Facts) -> Result<Keys> {
    f.whole_heads_rotate()?;
    let layers = f.layers()?;
    let pattern = f.key("attention.sliding_window_pattern")?;
    let sliding: Vec<bool> = match f.metadata.flags(&pattern)? {
        Some(given) => given.to_vec(),
        None => (0..layers).map(|layer| layer % 2 == 0).collect(),
    };
    let kind = |sliding: &bool| if *sliding { "sliding_attention" } else { "full_attention" };
    Ok(keys(json!({
        "model_type": "gpt_oss",
        "head_dim": f.head_dim()?,
        "intermediate_size": f.expert_width()?,
        "num_local_experts": f.uint("expert_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "sliding_window": f.uint("attention.sliding_window")?,
        "swiglu_limit": 7.0,
        "layer_types": sliding.iter().take(layers as usize).map(kind).collect::<Vec<_>>(),
        "attention_bias": true,
    })))
}

fn glm4_moe(f: &Facts) -> Result<Keys> {
    f.scores_are(SIGMOID_SCORES)?;
    let head_dim = f.head_dim()?;
    Ok(keys(json!({
        "model_type": "glm4_moe",
        "head_dim": head_dim,
        "partial_rotary_factor": f.uint_or("rope.dimension_count", head_dim)? as f64 / head_dim as f64,
        "intermediate_size": f.uint("feed_forward_length")?,
        "moe_intermediate_size": f.uint("expert_feed_forward_length")?,
        "n_routed_experts": f.uint("expert_count")?,
        "n_shared_experts": f.uint("expert_shared_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "first_k_dense_replace": f.uint_or("leading_dense_block_count", 0)?,
        "n_group": f.uint_or("expert_group_count", 1)?,
        "topk_group": f.uint_or("expert_group_used_count", 1)?,
        "norm_topk_prob": f.flag_or("expert_weights_norm", false)?,
        "routed_scaling_factor": f.scale()?,
        "attention_bias": f.has("model.layers.0.self_attn.q_proj.bias"),
        "use_qk_norm": f.has("model.layers.0.self_attn.q_norm.weight"),
    })))
}

fn granite_moe(f: &Facts) -> Result<Keys> {
    f.usual_head_dim()?;
    let multiplier = |key: &str| Ok::<_, StoreError>(f.opt_float(key)?.filter(|m| *m != 0.0));
    let attention = multiplier("attention.scale")?.unwrap_or((f.head_dim()? as f64).powf(-0.5));
    Ok(keys(json!({
        "model_type": "granitemoe",
        "intermediate_size": f.expert_width()?,
        "num_local_experts": f.uint("expert_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "attention_multiplier": attention,
        "embedding_multiplier": multiplier("embedding_scale")?.unwrap_or(1.0),
        "residual_multiplier": multiplier("residual_scale")?.unwrap_or(1.0),
        "logits_scaling": multiplier("logit_scale")?.unwrap_or(1.0),
        "attention_bias": false,
    })))
}

fn deepseek(f: &Facts) -> Result<Keys> {
    if f.opt_float("attention.temperature_scale")?.is_some_and(|s| s != 0.0) {
        return Err(f.unsupported("changes the temperature of attention with the position, which is not supported"));
    }
    let groups = f.uint_or("expert_group_count", 1)?;
    let (model_type, method, scores) = match f.uint_or("expert_gating_func", SOFTMAX_SCORES)? {
        SIGMOID_SCORES => ("deepseek_v3", "noaux_tc", "sigmoid"),
        SOFTMAX_SCORES if groups > 1 => ("deepseek_v2", "group_limited_greedy", "softmax"),
        SOFTMAX_SCORES => ("deepseek_v2", "greedy", "softmax"),
        other => return Err(f.unsupported(format!("scores its experts in the unknown way {other}"))),
    };
    let key_width = f.uint_or("attention.key_length_mla", f.uint_or("attention.key_length", 0)?)?;
    let rotated = f.uint("rope.dimension_count")?;
    let plain = key_width.checked_sub(rotated).filter(|w| *w > 0);
    Ok(keys(json!({
        "model_type": model_type,
        "num_key_value_heads": f.heads()?,
        "q_lora_rank": f.opt_uint("attention.q_lora_rank")?,
        "kv_lora_rank": f.uint("attention.kv_lora_rank")?,
        "qk_nope_head_dim": f.metadata.need("attention.key_length", plain)?,
        "qk_rope_head_dim": rotated,
        "v_head_dim": f.uint_or("attention.value_length_mla", f.uint("attention.value_length")?)?,
        "intermediate_size": f.uint("feed_forward_length")?,
        "moe_intermediate_size": f.uint("expert_feed_forward_length")?,
        "n_routed_experts": f.uint("expert_count")?,
        "n_shared_experts": f.uint("expert_shared_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "first_k_dense_replace": f.uint_or("leading_dense_block_count", 0)?,
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": f.uint_or("expert_group_used_count", 1)?,
        "topk_method": method,
        "scoring_func": scores,
        "norm_topk_prob": f.flag_or("expert_weights_norm", false)?,
        "routed_scaling_factor": f.scale()?,
        "attention_bias": false,
    })))
}

fn ernie(f: &Facts) -> Result<Keys> {
    f.usual_head_dim()?;
    Ok(keys(json!({
        "model_type": "ernie4_5_moe",
        "intermediate_size": f.uint("feed_forward_length")?,
        "moe_intermediate_size": f.uint("expert_feed_forward_length")?,
        "moe_num_experts": f.uint("expert_count")?,
        "moe_k": f.uint("expert_used_count")?,
        "moe_num_shared_experts": f.uint_or("expert_shared_count", 0)?,
        "moe_layer_start_index": f.uint_or("leading_dense_block_count", 0)?,
        "moe_layer_end_index": f.layers()? - 1,
        "moe_layer_interval": f.uint_or("interleave_moe_layer_step", 1)?,
        "use_bias": false,
    })))
}

fn lfm2_moe(f: &Facts) -> Result<Keys> {
    f.scores_are(SIGMOID_SCORES)?;
    f.usual_head_dim()?;
    let per_layer = f.key("attention.head_count_kv")?;
    let per_layer = f.metadata.need(&per_layer, f.metadata.ints(&per_layer)?)?;
    let kind = |heads: &i64| if *heads > 0 { "full_attention" } else { "conv" };
    let layers = f.layers()? as usize;
    Ok(keys(json!({
        "model_type": "lfm2_moe",
        "num_key_value_heads": per_layer.iter().max(),
        "layer_types": per_layer.iter().take(layers).map(kind).collect::<Vec<_>>(),
        "rms_norm_eps": null,
        "norm_eps": f.float("attention.layer_norm_rms_epsilon")?,
        "conv_L_cache": f.uint("shortconv.l_cache")?,
        "conv_bias": false,
        "intermediate_size": f.uint("feed_forward_length")?,
        "moe_intermediate_size": f.uint("expert_feed_forward_length")?,
        "num_dense_layers": f.uint_or("leading_dense_block_count", 0)?,
        "num_experts": f.uint("expert_count")?,
        "num_experts_per_tok": f.uint("expert_used_count")?,
        "norm_topk_prob": true,
        "use_expert_bias": true,
        "routed_scaling_factor": f.scale()?,
        "hidden_act": null,
    })))
}
