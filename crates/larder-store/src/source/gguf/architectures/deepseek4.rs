//! Tensor names and config of DeepSeek-V4.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SQRT_SOFTPLUS_SCORES, keys};
use crate::source::gguf::remap::{
    Remap::{Integers, Same},
    Rename,
};

pub(super) const DEEPSEEK4_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
    ("output_hc_fn.weight", "model.hc_head_fn", Same),
    ("output_hc_base.weight", "model.hc_head_base", Same),
    ("output_hc_scale.weight", "model.hc_head_scale", Same),
];

pub(super) const DEEPSEEK4_ATTENTION: &[Rename] = &[
    ("attn_sinks.weight", "attn.attn_sink", Same),
    ("attn_q_a.weight", "attn.wq_a.weight", Same),
    ("attn_q_a_norm.weight", "attn.q_norm.weight", Same),
    ("attn_q_b.weight", "attn.wq_b.weight", Same),
    ("attn_kv.weight", "attn.wkv.weight", Same),
    ("attn_kv_a_norm.weight", "attn.kv_norm.weight", Same),
    ("attn_output_a.weight", "attn.wo_a.weight", Same),
    ("attn_output_b.weight", "attn.wo_b.weight", Same),
    ("attn_compressor_kv.weight", "attn.compressor.wkv.weight", Same),
    ("attn_compressor_gate.weight", "attn.compressor.wgate.weight", Same),
    ("attn_compressor_ape.weight", "attn.compressor.ape", Same),
    ("attn_compressor_norm.weight", "attn.compressor.norm.weight", Same),
    ("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight", Same),
    ("indexer.proj.weight", "attn.indexer.weights_proj.weight", Same),
    ("indexer_compressor_kv.weight", "attn.indexer.compressor.wkv.weight", Same),
    ("indexer_compressor_gate.weight", "attn.indexer.compressor.wgate.weight", Same),
    ("indexer_compressor_ape.weight", "attn.indexer.compressor.ape", Same),
    ("indexer_compressor_norm.weight", "attn.indexer.compressor.norm.weight", Same),
];

/// Everything else in a layer; the experts' bias for pictures is not used.
pub(super) const DEEPSEEK4_PARTS: &[Rename] = &[
    ("attn_norm.weight", "attn_norm.weight", Same),
    ("ffn_norm.weight", "ffn_norm.weight", Same),
    ("ffn_gate_inp.weight", "ffn.gate.weight", Same),
    ("exp_probs_b.bias", "ffn.gate.bias", Same),
    ("exp_probs_b_vl.bias", "ffn.gate.bias_vl", Same),
    ("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", Integers),
    ("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight", Same),
    ("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight", Same),
    ("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight", Same),
];

/// The weights of hyper-connections.
pub(super) const HYPER_CONNECTIONS: &[Rename] = &[
    ("hc_attn_fn.weight", "hc_attn_fn", Same),
    ("hc_attn_base.weight", "hc_attn_base", Same),
    ("hc_attn_scale.weight", "hc_attn_scale", Same),
    ("hc_ffn_fn.weight", "hc_ffn_fn", Same),
    ("hc_ffn_base.weight", "hc_ffn_base", Same),
    ("hc_ffn_scale.weight", "hc_ffn_scale", Same),
];

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
    let mut own = hyper_connections(hp)?;
    own.extend(keys(json!({
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
        "num_hash_layers": hp.uint("hash_layer_count")?,
        "swiglu_limit": swiglu_limit(hp)?,
        "moe_intermediate_size": hp.expert_width()?,
        "n_routed_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": hp.scale()?,
    })));
    Ok(own)
}

/// The keys of hyper-connections.
pub(super) fn hyper_connections(hp: &Hyperparameters) -> Result<Keys> {
    Ok(keys(json!({
        "hc_mult": hp.uint("hyper_connection.count")?,
        "hc_sinkhorn_iters": hp.uint("hyper_connection.sinkhorn_iterations")?,
        "hc_eps": hp.float("hyper_connection.epsilon")?,
    })))
}

/// The bound of gate and up, which is one for all layers and for shared experts.
pub(super) fn swiglu_limit(hp: &Hyperparameters) -> Result<f32> {
    let bounds = |key: &str| hp.metadata.floats(&hp.key(key)?);
    let experts = hp.metadata.need("swiglu_clamp_exp", bounds("swiglu_clamp_exp")?)?;
    let shared = bounds("swiglu_clamp_shexp")?.unwrap_or(experts);
    let first = hp.metadata.need("swiglu_clamp_exp", experts.first())?;
    if experts.iter().chain(shared).all(|bound| bound == first) {
        Ok(*first)
    } else {
        Err(hp.unsupported("bounds gate and up differently by layer, which its architecture does not"))
    }
}
