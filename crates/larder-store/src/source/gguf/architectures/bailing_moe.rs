//! Tensor names and configs of Ling: the first two versions.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, SOFTMAX_SCORES, keys, share};
use crate::source::gguf::remap::{
    Remap::{KeyRows, QueryRows, Same},
    Rename,
};

/// Ling's queries, keys and values, which the hub has in one tensor; it has no names for these.
pub(super) const LING_SPLIT: &[Rename] = &[
    ("attn_q.weight", "attention.q_proj.weight", QueryRows),
    ("attn_k.weight", "attention.k_proj.weight", KeyRows),
    ("attn_v.weight", "attention.v_proj.weight", Same),
];

pub(super) const LING_JOINED: &[Rename] = &[
    ("attn_qkv.weight", "attention.query_key_value.weight", Same),
    ("attn_q_norm.weight", "attention.query_layernorm.weight", Same),
    ("attn_k_norm.weight", "attention.key_layernorm.weight", Same),
];

pub(super) const LING_OUTPUT: &[Rename] = &[("attn_output.weight", "attention.dense.weight", Same)];

pub(super) const LING_ROUTER_BIAS: &[Rename] = &[("exp_probs_b.bias", "mlp.gate.expert_bias", Same)];

/// llama.cpp's converter splits the product of queries, keys and values, and divides the columns of the output head by
/// their lengths.
pub(super) fn bailingmoe(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SOFTMAX_SCORES)?;
    hp.whole_heads_rotate()?;
    if hp.scale()? != 1.0 {
        return Err(hp.unsupported("scales the weights of its experts, which its architecture does not"));
    }
    let mut own = both(hp)?;
    own.extend(keys(json!({
        "model_type": "bailing_moe",
        "split_qkv": true,
        "norm_topk_prob": hp.flag_or("expert_weights_norm", false)?,
    })));
    Ok(own)
}

pub(super) fn bailingmoe2(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    if !hp.flag_or("expert_weights_norm", false)? {
        return Err(hp.unsupported("does not normalise the weights of its experts, which its architecture does"));
    }
    let head_dim = hp.head_dim()?;
    let mut own = both(hp)?;
    own.extend(keys(json!({
        "model_type": "bailing_moe_v2",
        "partial_rotary_factor": share(hp.uint_or("rope.dimension_count", head_dim)?, head_dim),
        "n_group": hp.uint_or("expert_group_count", 1)?,
        "topk_group": hp.uint_or("expert_group_used_count", 1)?,
        "routed_scaling_factor": hp.scale()?,
    })));
    Ok(own)
}

fn both(hp: &Hyperparameters) -> Result<Keys> {
    Ok(keys(json!({
        "head_dim": hp.head_dim()?,
        "use_bias": false,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "num_shared_experts": hp.uint("expert_shared_count")?,
        "first_k_dense_replace": hp.uint_or("leading_dense_block_count", 0)?,
    })))
}
