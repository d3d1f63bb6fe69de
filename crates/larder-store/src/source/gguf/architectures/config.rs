//! Builds a model's config, with the keys of the Hugging Face hub, from the metadata of a GGUF file.
//!
//! Keys that are missing in the metadata get the values with which llama.cpp runs the architecture.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{
    bailing_moe::{bailingmoe, bailingmoe2},
    deepseek4::deepseek4,
    gated_delta::{qwen3_next, qwen35_moe},
    granite::{granite_hybrid, granite_moe},
    kimi_delta::{bailingmoe3, glm5_next, kimi_linear},
    latent_attention::{deepseek, deepseek32, glm_dsa, mistral4},
    minimax_m3::minimax_m3,
    qwen4_exp::qwen4_exp,
    sliding::{exaone_moe, gemma4, smallthinker},
    state_space::{jamba, nemotron_h},
    typed_layers::{afmoe, laguna, mellum, mimo2, step35},
};
use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, keys};
use crate::source::gguf::layer_lists::{layer_types, sliding_layers};
use crate::source::gguf::metadata::Metadata;
use crate::source::gguf::rope_factors::RopeFactors;
use crate::source::gguf::stored::HubTensor;

/// Experts of Llama 4 Maverick, by which GGUF files tell that its queries and keys are not normalised.
const MAVERICK_EXPERTS: u64 = 128;

/// The config of the model of a file; `tensors` have the names of the hub.
pub(in crate::source::gguf) fn hub_config(
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
        "qwen3vlmoe" => qwen3_vl_moe(&hp)?,
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

/// As Qwen3-MoE, with positions of three dimensions.
fn qwen3_vl_moe(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = qwen3_moe(hp)?;
    own.insert("model_type".into(), "qwen3_vl_moe_text".into());
    if let Some(sections) = hp.metadata.ints(&hp.key("rope.dimension_sections")?)? {
        // The fourth section, which has no frequencies, is that of llama.cpp.
        let sections: Vec<i64> = sections.iter().take(3).copied().collect();
        let mut scaling = hp.rope_scaling()?;
        if !scaling.is_object() {
            scaling = json!({"rope_type": "default"});
        }
        scaling["mrope_section"] = sections.into();
        own.insert("rope_scaling".into(), scaling);
    }
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
