//! Builds a model's config, with the keys of the Hugging Face hub, from the metadata of a GGUF file.
//!
//! Keys that are missing in the metadata get the values with which llama.cpp runs the architecture.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    bailing_moe::{bailingmoe, bailingmoe2},
    deepseek4::deepseek4,
    hyperparameters::{Hyperparameters, Keys, keys},
    indexers::{deepseek32, glm_dsa},
    kimi_delta::{bailingmoe3, glm5_next, kimi_linear},
    metadata::Metadata,
    minimax_m3::minimax_m3,
    names::HubTensor,
    qwen4_exp::qwen4_exp,
    rope_factors::RopeFactors,
    sliding::{exaone_moe, gemma4, layer_types, sliding_layers, smallthinker},
    state_space::{granite_hybrid, jamba, nemotron_h},
    typed_layers::{afmoe, laguna, mellum, mimo2, step35},
};
use crate::error::{Result, StoreError};

/// GGUF's numbers of the router's score functions (`expert_gating_func`).
pub(super) const SOFTMAX_SCORES: u64 = 1;
pub(super) const SIGMOID_SCORES: u64 = 2;
pub(super) const SQRT_SOFTPLUS_SCORES: u64 = 4;

/// Positions for which Mistral Small 4 was trained before its context was extended, and by how much it scales queries
/// up beyond them.
const MISTRAL4_TRAINED: u64 = 8192;
const MISTRAL4_BETA: f64 = 0.1;

/// Experts of Llama 4 Maverick, by which GGUF files tell that its queries and keys are not normalised.
const MAVERICK_EXPERTS: u64 = 128;

/// The config of the model of a file; `tensors` have the names of the hub.
pub(super) fn hub_config(
    metadata: &Metadata,
    tensors: &HashMap<String, HubTensor>,
    rope_factors: &RopeFactors,
) -> Result<Value> {
    let hp = Hyperparameters::of(metadata, tensors, rope_factors);
    let arch = metadata.architecture()?;
    let own = match arch {
        "llama" => mixtral(&hp)?,
        "qwen2moe" => qwen2_moe(&hp)?,
        "qwen3moe" => qwen3_moe(&hp)?,
        "olmoe" => olmoe(&hp)?,
        "gpt-oss" => gpt_oss(&hp)?,
        "gemma4" => gemma4(&hp)?,
        "glm4moe" => glm4_moe(&hp)?,
        "granitemoe" => granite_moe(&hp)?,
        "granitehybrid" => granite_hybrid(&hp)?,
        "jamba" => jamba(&hp)?,
        "nemotron_h_moe" => nemotron_h(&hp)?,
        "deepseek2" => deepseek(&hp)?,
        "deepseek4" => deepseek4(&hp)?,
        "mistral4" => mistral4(&hp)?,
        "deepseek32" => deepseek32(&hp)?,
        "glm-dsa" => glm_dsa(&hp)?,
        "dots1" => dots1(&hp)?,
        "exaone-moe" => exaone_moe(&hp)?,
        "ernie4_5-moe" => ernie(&hp)?,
        "lfm2moe" => lfm2_moe(&hp)?,
        "phimoe" => phimoe(&hp)?,
        "qwen3next" => qwen3_next(&hp)?,
        "qwen35moe" => qwen35_moe(&hp)?,
        "qwen4exp" => qwen4_exp(&hp)?,
        "minimax-m2" => minimax_m2(&hp)?,
        "minimax-m3" => minimax_m3(&hp)?,
        "hunyuan-moe" => hunyuan_moe(&hp)?,
        "hy_v3" => hy_v3(&hp)?,
        "smallthinker" => smallthinker(&hp)?,
        "llama4" => llama4(&hp)?,
        "mellum" => mellum(&hp)?,
        "afmoe" => afmoe(&hp)?,
        "laguna" => laguna(&hp)?,
        "mimo2" => mimo2(&hp)?,
        "step35" => step35(&hp)?,
        "bailingmoe" => bailingmoe(&hp)?,
        "bailingmoe2" => bailingmoe2(&hp)?,
        "bailingmoe3" => bailingmoe3(&hp)?,
        "kimi-linear" => kimi_linear(&hp)?,
        "glm5-next" => glm5_next(&hp)?,
        other => return Err(hp.unsupported(format!("has the architecture '{other}', which is not supported"))),
    };
    let mut config = hp.common()?;
    // Keys of the architecture replace the common ones; null removes a common key.
    config.extend(own);
    config.retain(|_, value| !value.is_null());
    Ok(Value::Object(config))
}

fn mixtral(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    Ok(keys(json!({
        "model_type": "mixtral",
        "head_dim": hp.unusual_head_dim()?,
        "intermediate_size": hp.expert_width()?,
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "sliding_window": hp.opt_uint("attention.sliding_window")?.filter(|w| *w > 0),
    })))
}

fn qwen2_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.usual_head_dim()?;
    let mut own = hp.qwen("qwen2_moe", false)?;
    let width = hp.uint_or("expert_shared_feed_forward_length", hp.uint("feed_forward_length")?)?;
    own.insert("shared_expert_intermediate_size".into(), width.into());
    own.insert("qkv_bias".into(), hp.has("model.layers.0.self_attn.q_proj.bias").into());
    Ok(own)
}

fn qwen3_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    let mut own = hp.qwen("qwen3_moe", true)?;
    own.insert("head_dim".into(), hp.head_dim()?.into());
    own.insert("attention_bias".into(), false.into());
    Ok(own)
}

fn olmoe(hp: &Hyperparameters) -> Result<Keys> {
    hp.usual_head_dim()?;
    Ok(keys(json!({
        "model_type": "olmoe",
        "intermediate_size": hp.expert_width()?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "norm_topk_prob": hp.flag_or("expert_weights_norm", false)?,
        "clip_qkv": hp.opt_float("attention.clamp_kqv")?.filter(|c| *c > 0.0),
        "attention_bias": false,
    })))
}

fn gpt_oss(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    Ok(keys(json!({
        "model_type": "gpt_oss",
        "head_dim": hp.head_dim()?,
        "intermediate_size": hp.expert_width()?,
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "sliding_window": hp.uint("attention.sliding_window")?,
        "swiglu_limit": 7.0,
        "layer_types": layer_types(&sliding_layers(hp, 2)?),
        "attention_bias": true,
    })))
}

fn glm4_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let head_dim = hp.head_dim()?;
    let mut own = hp.deepseek_ffn()?;
    own.extend(keys(json!({
        "model_type": "glm4_moe",
        "head_dim": head_dim,
        "partial_rotary_factor": hp.uint_or("rope.dimension_count", head_dim)? as f64 / head_dim as f64,
        "attention_bias": hp.has("model.layers.0.self_attn.q_proj.bias"),
        "use_qk_norm": hp.has("model.layers.0.self_attn.q_norm.weight"),
    })));
    Ok(own)
}

pub(super) fn granite_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.usual_head_dim()?;
    let multiplier = |key: &str| Ok::<_, StoreError>(hp.opt_float(key)?.filter(|m| *m != 0.0));
    let attention = multiplier("attention.scale")?.unwrap_or((hp.head_dim()? as f64).powf(-0.5));
    let shared = hp.opt_uint("expert_shared_feed_forward_length")?.filter(|width| *width > 0);
    Ok(keys(json!({
        "model_type": if shared.is_some() { "granitemoeshared" } else { "granitemoe" },
        "shared_intermediate_size": shared,
        "split_shared_mlp": shared.map(|_| true),
        "intermediate_size": hp.expert_width()?,
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "attention_multiplier": attention,
        "embedding_multiplier": multiplier("embedding_scale")?.unwrap_or(1.0),
        "residual_multiplier": multiplier("residual_scale")?.unwrap_or(1.0),
        "logits_scaling": multiplier("logit_scale")?.unwrap_or(1.0),
        "attention_bias": false,
    })))
}

fn deepseek(hp: &Hyperparameters) -> Result<Keys> {
    // Older files of GLM-4.7-Flash do not say which scores it has; a bias for the choice belongs to the sigmoid.
    let biased = (0..hp.layers()?).any(|l| hp.has(&format!("model.layers.{l}.mlp.gate.e_score_correction_bias")));
    let scores = hp.uint_or("expert_gating_func", if biased { SIGMOID_SCORES } else { SOFTMAX_SCORES })?;
    if hp.opt_float("attention.temperature_scale")?.is_some_and(|s| s != 0.0) {
        return match (scores, biased) {
            (SOFTMAX_SCORES, false) => mistral4(hp),
            _ => Err(hp.unsupported("scales the attention temperature by position, which its gate does not go with")),
        };
    }
    let groups = hp.uint_or("expert_group_count", 1)?;
    let (model_type, method, scores) = match scores {
        SIGMOID_SCORES => ("deepseek_v3", "noaux_tc", "sigmoid"),
        SOFTMAX_SCORES if groups > 1 => ("deepseek_v2", "group_limited_greedy", "softmax"),
        SOFTMAX_SCORES => ("deepseek_v2", "greedy", "softmax"),
        other => return Err(hp.unsupported(format!("uses the unknown expert gating function {other}"))),
    };
    let mut own = latent(hp)?;
    own.extend(keys(json!({
        "model_type": model_type,
        "moe_layer_freq": 1,
        "topk_method": method,
        "scoring_func": scores,
    })));
    Ok(own)
}

/// The keys of models with the latent attention of DeepSeek.
pub(super) fn latent(hp: &Hyperparameters) -> Result<Keys> {
    let key_width = hp.uint_or("attention.key_length_mla", hp.uint_or("attention.key_length", 0)?)?;
    let rotated = hp.uint("rope.dimension_count")?;
    let plain = key_width.checked_sub(rotated).filter(|w| *w > 0);
    let mut own = hp.deepseek_ffn()?;
    own.extend(keys(json!({
        "num_key_value_heads": hp.heads()?,
        "q_lora_rank": hp.opt_uint("attention.q_lora_rank")?,
        "kv_lora_rank": hp.uint("attention.kv_lora_rank")?,
        "split_kv_b": hp.has_suffix(".k_b_proj.weight").then_some(true),
        "qk_nope_head_dim": hp.metadata.need("attention.key_length", plain)?,
        "qk_rope_head_dim": rotated,
        "v_head_dim": match hp.opt_uint("attention.value_length_mla")? {
            Some(width) => width,
            None => hp.uint("attention.value_length")?,
        },
        "attention_bias": false,
    })));
    Ok(own)
}

/// llama.cpp's converter does not write the scaling of queries by position, which the published model has.
fn mistral4(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SOFTMAX_SCORES)?;
    let trained = hp.uint_or("rope.scaling.original_context_length", MISTRAL4_TRAINED)?;
    if hp.uint_or("attention.temperature_length", trained)? != trained {
        return Err(hp.unsupported("scales queries from another position on than RoPE, which is not supported"));
    }
    let mut rope = rope_object(hp.rope_scaling()?);
    rope.extend(keys(json!({
        "rope_theta": hp.opt_float("rope.freq_base")?.unwrap_or(10000.0),
        "original_max_position_embeddings": trained,
        "llama_4_scaling_beta": hp.opt_float("attention.temperature_scale")?.unwrap_or(MISTRAL4_BETA),
    })));
    let mut own = latent(hp)?;
    own.extend(keys(json!({
        "model_type": "mistral4", "rope_parameters": rope, "rope_scaling": null, "rope_theta": null,
    })));
    Ok(own)
}

/// The `rope_scaling` of the config as an object that other keys can be added to.
pub(super) fn rope_object(scaling: Value) -> Keys {
    match keys(scaling) {
        none if none.is_empty() => keys(json!({ "rope_type": "default" })),
        some => some,
    }
}

fn dots1(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    hp.whole_heads_rotate()?;
    let mut own = hp.deepseek_ffn()?;
    own.extend(keys(json!({
        "model_type": "dots1",
        "head_dim": hp.head_dim()?,
        "sliding_window": null,
        "layer_types": vec!["full_attention"; hp.layers()? as usize],
        "attention_bias": false,
    })));
    Ok(own)
}

fn ernie(hp: &Hyperparameters) -> Result<Keys> {
    hp.usual_head_dim()?;
    Ok(keys(json!({
        "model_type": "ernie4_5_moe",
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "moe_num_experts": hp.uint("expert_count")?,
        "moe_k": hp.uint("expert_used_count")?,
        "moe_num_shared_experts": hp.uint_or("expert_shared_count", 0)?,
        "moe_layer_start_index": hp.uint_or("leading_dense_block_count", 0)?,
        "moe_layer_end_index": hp.layers()? - 1,
        "moe_layer_interval": hp.uint_or("interleave_moe_layer_step", 1)?,
        "use_bias": false,
    })))
}

fn lfm2_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    hp.usual_head_dim()?;
    let per_layer = hp.key("attention.head_count_kv")?;
    let per_layer = hp.metadata.need(&per_layer, hp.metadata.ints(&per_layer)?)?;
    let kind = |heads: &i64| if *heads > 0 { "full_attention" } else { "conv" };
    let layers = hp.layers()? as usize;
    Ok(keys(json!({
        "model_type": "lfm2_moe",
        "num_key_value_heads": per_layer.iter().max(),
        "layer_types": per_layer.iter().take(layers).map(kind).collect::<Vec<_>>(),
        "rms_norm_eps": null,
        "norm_eps": hp.float("attention.layer_norm_rms_epsilon")?,
        "conv_L_cache": hp.uint("shortconv.l_cache")?,
        "conv_bias": false,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "num_dense_layers": hp.uint_or("leading_dense_block_count", 0)?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "norm_topk_prob": true,
        "use_expert_bias": true,
        "routed_scaling_factor": hp.scale()?,
        "hidden_act": null,
    })))
}

fn phimoe(hp: &Hyperparameters) -> Result<Keys> {
    hp.usual_head_dim()?;
    Ok(keys(json!({
        "model_type": "phimoe",
        "intermediate_size": hp.expert_width()?,
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "sliding_window": hp.opt_uint("attention.sliding_window")?.filter(|w| *w > 0),
        "attention_bias": hp.has("model.layers.0.self_attn.q_proj.bias"),
        "lm_head_bias": hp.has("lm_head.bias"),
    })))
}

fn qwen3_next(hp: &Hyperparameters) -> Result<Keys> {
    let first = linear_layers(hp)?.iter().position(|linear| *linear).unwrap_or(0);
    let mut own = hp.qwen("qwen3_next", true)?;
    own.extend(gated_delta(hp)?);
    own.extend(keys(json!({
        "use_sliding_window": null,
        "shared_expert_intermediate_size":
            hp.uint_or("expert_shared_feed_forward_length", hp.uint("feed_forward_length")?)?,
        "split_qkvz": hp.has(&format!("model.layers.{first}.linear_attn.in_proj_qkv.weight")).then_some(true),
    })));
    Ok(own)
}

fn qwen35_moe(hp: &Hyperparameters) -> Result<Keys> {
    let width = hp.expert_width()?;
    let mut own = gated_delta(hp)?;
    own.extend(keys(json!({
        "model_type": "qwen3_5_moe_text",
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": hp.uint_or("expert_shared_feed_forward_length", width)?,
        "tiled_value_heads": true,
    })));
    Ok(own)
}

/// The keys of the mixers of Qwen3-Next and its successors.
pub(super) fn gated_delta(hp: &Hyperparameters) -> Result<Keys> {
    let (head_dim, values) = (hp.head_dim()?, hp.uint("ssm.time_step_rank")?);
    let value_width = hp.uint("ssm.inner_size")?.checked_div(values).filter(|w| *w > 0);
    let kind = |linear: &bool| if *linear { "linear_attention" } else { "full_attention" };
    Ok(keys(json!({
        "head_dim": head_dim,
        "partial_rotary_factor": hp.uint_or("rope.dimension_count", head_dim)? as f64 / head_dim as f64,
        "attention_bias": false,
        "layer_types": linear_layers(hp)?.iter().map(kind).collect::<Vec<_>>(),
        "linear_conv_kernel_dim": hp.uint("ssm.conv_kernel")?,
        "linear_num_key_heads": hp.uint("ssm.group_count")?,
        "linear_key_head_dim": hp.uint("ssm.state_size")?,
        "linear_num_value_heads": values,
        "linear_value_head_dim": hp.metadata.need("ssm.inner_size of whole heads", value_width)?,
    })))
}

fn minimax_m2(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let head_dim = hp.head_dim()?;
    Ok(keys(json!({
        "model_type": "minimax_m2",
        "head_dim": head_dim,
        "rotary_dim": hp.uint_or("rope.dimension_count", head_dim)?,
        "intermediate_size": hp.expert_width()?,
        "num_local_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
    })))
}

fn hunyuan_moe(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    let width = hp.expert_width()?;
    Ok(keys(json!({
        "model_type": "hunyuan_v1_moe",
        "head_dim": hp.head_dim()?,
        "intermediate_size": hp.uint_or("expert_shared_feed_forward_length", width)?,
        "moe_intermediate_size": width,
        "num_experts": hp.uint("expert_count")?,
        "moe_topk": hp.uint("expert_used_count")?,
        "attention_bias": false,
    })))
}

fn hy_v3(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    hp.whole_heads_rotate()?;
    let width = hp.uint("expert_feed_forward_length")?;
    let dense = |layer| hp.has(&format!("model.layers.{layer}.mlp.gate_proj.weight"));
    let kind = |layer| if dense(layer) { "dense" } else { "sparse" };
    Ok(keys(json!({
        "model_type": "hy_v3",
        "head_dim": hp.head_dim()?,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": width,
        "num_shared_experts": hp.shared_experts()?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "mlp_layer_types": (0..hp.layers()?).map(kind).collect::<Vec<_>>(),
        "route_norm": hp.flag_or("expert_weights_norm", false)?,
        "router_scaling_factor": hp.scale()?,
        "attention_bias": false,
    })))
}

/// For each layer, whether it has linear attention.
fn linear_layers(hp: &Hyperparameters) -> Result<Vec<bool>> {
    let layers = hp.layers()?;
    let every = hp.uint_or("full_attention_interval", 4)?;
    match hp.metadata.flags(&hp.key("attention.recurrent_layers")?)? {
        Some(given) => Ok(given.iter().take(layers as usize).copied().collect()),
        None if every == 0 => Err(hp.unsupported("has 0 as its interval of layers with full attention")),
        None => Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()),
    }
}

/// The chunks and the temperature have no keys in GGUF: llama.cpp runs all Llama 4 with those of the published models.
fn llama4(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    hp.scores_are(SIGMOID_SCORES)?;
    if hp.opt_uint("attention.sliding_window")? == Some(0) {
        return Err(hp.unsupported("has full attention in all layers, which Llama 4 with experts does not have"));
    }
    let experts = hp.uint("expert_count")?;
    Ok(keys(json!({
        "model_type": "llama4_text",
        "head_dim": hp.head_dim()?,
        "intermediate_size": hp.uint("expert_feed_forward_length")?,
        "intermediate_size_mlp": hp.uint("feed_forward_length")?,
        "num_local_experts": experts,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "interleave_moe_layer_step": hp.uint("interleave_moe_layer_step")?,
        "no_rope_layer_interval": 4,
        "use_qk_norm": experts != MAVERICK_EXPERTS,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": true,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attention_bias": false,
    })))
}
