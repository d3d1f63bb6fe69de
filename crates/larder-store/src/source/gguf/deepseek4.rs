//! Config of DeepSeek-V4.

use serde_json::json;

use super::{
    config::SQRT_SOFTPLUS_SCORES,
    hyperparameters::{Hyperparameters, Keys, keys},
};
use crate::error::Result;

/// Tokens of an entry in the layers without an indexer, for which GGUF has no key beside their ratio.
const HEAVY_RATE: u64 = 128;

pub(super) fn deepseek4(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SQRT_SOFTPLUS_SCORES)?;
    if !hp.flag_or("expert_weights_norm", true)? {
        return Err(hp.unsupported("does not normalise the weights of its experts, which its architecture does"));
    }
    let key = "attention.compress_ratios";
    let ratios = hp.metadata.need(key, hp.metadata.ints(&hp.key(key)?)?)?;
    let layers = hp.layers()? as usize;
    Ok(keys(json!({
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": hp.uint("attention.key_length")?,
        "qk_rope_head_dim": hp.uint("rope.dimension_count")?,
        "q_lora_rank": hp.uint("attention.q_lora_rank")?,
        "sliding_window": hp.uint("attention.sliding_window")?,
        "o_groups": hp.uint("attention.output_group_count")?,
        "o_lora_rank": hp.uint("attention.output_lora_rank")?,
        "compress_ratios": ratios.iter().take(layers).collect::<Vec<_>>(),
        "compress_rate_hca": HEAVY_RATE,
        "compress_rope_theta": hp.float("attention.compress_rope_freq_base")?,
        "index_n_heads": hp.uint("attention.indexer.head_count")?,
        "index_head_dim": hp.uint("attention.indexer.key_length")?,
        "index_topk": hp.uint("attention.indexer.top_k")?,
        "hc_mult": hp.uint("hyper_connection.count")?,
        "hc_sinkhorn_iters": hp.uint("hyper_connection.sinkhorn_iterations")?,
        "hc_eps": hp.float("hyper_connection.epsilon")?,
        "num_hash_layers": hp.uint("hash_layer_count")?,
        "swiglu_limit": swiglu_limit(hp)?,
        "moe_intermediate_size": hp.expert_width()?,
        "n_routed_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": hp.scale()?,
    })))
}

/// The bound of gate and up, which is one for all layers and for shared experts.
fn swiglu_limit(hp: &Hyperparameters) -> Result<f32> {
    let bounds = |key: &str| hp.metadata.floats(&hp.key(key)?);
    let experts = hp.metadata.need("swiglu_clamp_exp", bounds("swiglu_clamp_exp")?)?;
    let shared = bounds("swiglu_clamp_shexp")?.unwrap_or(experts);
    let first = hp.metadata.need("swiglu_clamp_exp", experts.first())?;
    match experts.iter().chain(shared).all(|bound| bound == first) {
        true => Ok(*first),
        false => Err(hp.unsupported("bounds gate and up differently by layer, which its architecture does not")),
    }
}
