//! Configs of models with the latent attention of DeepSeek, with and without an indexer that chooses positions.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, SOFTMAX_SCORES, keys, rope_object};
use crate::source::gguf::layer_lists::listed_layers;

/// Positions for which Mistral Small 4 was trained before its context was extended, and by how much it scales queries
/// up beyond them.
const MISTRAL4_TRAINED: u64 = 8192;
const MISTRAL4_BETA: f64 = 0.1;

pub(super) fn deepseek(hp: &Hyperparameters) -> Result<Keys> {
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
pub(super) fn mistral4(hp: &Hyperparameters) -> Result<Keys> {
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

pub(super) fn deepseek32(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = with_indexers(hp)?;
    own.insert("model_type".into(), "deepseek_v32".into());
    Ok(own)
}

pub(super) fn glm_dsa(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = with_indexers(hp)?;
    own.extend(keys(json!({ "model_type": "glm_moe_dsa", "indexer_types": indexer_types(hp)? })));
    Ok(own)
}

/// For each layer whether it has an indexer. Older files of GLM do not list those that have, which are those with its
/// tensors.
pub(super) fn indexer_types(hp: &Hyperparameters) -> Result<Vec<&'static str>> {
    let own_indexers = match listed_layers(hp, "attention.indexer.types")? {
        Some(listed) => listed,
        None => (0..hp.layers()?).map(|l| hp.has(&format!("model.layers.{l}.self_attn.indexer.wk.weight"))).collect(),
    };
    Ok(own_indexers.into_iter().map(|own| if own { "full" } else { "shared" }).collect())
}

/// The keys of latent attention and of indexers.
pub(super) fn with_indexers(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let mut own = latent(hp)?;
    own.extend(keys(json!({
        "index_n_heads": hp.uint("attention.indexer.head_count")?,
        "index_head_dim": hp.uint("attention.indexer.key_length")?,
        "index_topk": hp.uint("attention.indexer.top_k")?,
    })));
    Ok(own)
}
