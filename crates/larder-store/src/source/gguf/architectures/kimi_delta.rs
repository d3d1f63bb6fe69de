//! Tensor names and configs of models with Kimi Delta Attention: Kimi Linear, the third Ling, GLM-5-Next.

use serde_json::json;

use super::{
    deepseek4::{hyper_connections, swiglu_limit},
    latent_attention::{indexer_types, latent, with_indexers},
};
use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, keys};
use crate::source::gguf::layer_lists::key_heads;
use crate::source::gguf::remap::{
    Remap::{AsChannels, Exp, NegatedExp, NegatedExpOfHeads, Same},
    Rename,
};

/// Linear attention of Kimi, whose layers with latent attention share some of the names.
pub(super) const KIMI_DELTA: &[Rename] = &[
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("ssm_conv1d_q.weight", "self_attn.q_conv1d.weight", AsChannels),
    ("ssm_conv1d_k.weight", "self_attn.k_conv1d.weight", AsChannels),
    ("ssm_conv1d_v.weight", "self_attn.v_conv1d.weight", AsChannels),
    ("ssm_f_a.weight", "self_attn.f_a_proj.weight", Same),
    ("ssm_f_b.weight", "self_attn.f_b_proj.weight", Same),
    ("ssm_g_a.weight", "self_attn.g_a_proj.weight", Same),
    ("ssm_g_b.weight", "self_attn.g_b_proj.weight", Same),
    ("ssm_beta.weight", "self_attn.b_proj.weight", Same),
    ("ssm_dt.bias", "self_attn.dt_bias", Same),
    ("ssm_norm.weight", "self_attn.o_norm.weight", Same),
];

pub(super) const KIMI_DECAYS: &[Rename] = &[("ssm_a", "self_attn.A_log", NegatedExpOfHeads)];

/// The decays of GLM, and the weights of the keys of its indexers in blocks.
pub(super) const GLM5_NEXT: &[Rename] = &[
    ("ssm_a", "self_attn.A_log", NegatedExp),
    ("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate", Same),
    ("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape", Same),
];

pub(super) const KIMI_EXPERTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "block_sparse_moe.gate.weight", Same),
    ("exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias", Same),
    ("ffn_gate_shexp.weight", "block_sparse_moe.shared_experts.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "block_sparse_moe.shared_experts.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "block_sparse_moe.shared_experts.down_proj.weight", Same),
];

/// Both kinds of attention of Ling.
pub(super) const LING_HYBRID: &[Rename] = &[
    ("attn_q.weight", "attention.q_proj.weight", Same),
    ("attn_k.weight", "attention.k_proj.weight", Same),
    ("attn_v.weight", "attention.v_proj.weight", Same),
    ("ssm_conv1d_q.weight", "attention.q_conv1d.weight", AsChannels),
    ("ssm_conv1d_k.weight", "attention.k_conv1d.weight", AsChannels),
    ("ssm_conv1d_v.weight", "attention.v_conv1d.weight", AsChannels),
    ("ssm_f_a.weight", "attention.f_proj.weight", Same),
    ("ssm_g_a.weight", "attention.g_proj.weight", Same),
    ("ssm_beta.weight", "attention.b_proj.weight", Same),
    ("ssm_dt.bias", "attention.dt_bias", Same),
    ("ssm_a", "attention.A_log", Exp),
    ("ssm_norm.weight", "attention.o_norm.weight", Same),
    ("attn_q_a.weight", "attention.q_a_proj.weight", Same),
    ("attn_q_a_norm.weight", "attention.q_a_layernorm.weight", Same),
    ("attn_q_b.weight", "attention.q_b_proj.weight", Same),
    ("attn_kv_a_mqa.weight", "attention.kv_a_proj_with_mqa.weight", Same),
    ("attn_kv_a_norm.weight", "attention.kv_a_layernorm.weight", Same),
    ("attn_kv_b.weight", "attention.kv_b_proj.weight", Same),
    ("attn_k_b.weight", "attention.k_b_proj.weight", Same),
    ("attn_v_b.weight", "attention.v_b_proj.weight", Same),
    ("attn_gate.weight", "attention.g_proj.weight", Same),
];

/// llama.cpp normalises the weights of Kimi's experts whatever the file says.
pub(super) fn kimi_linear(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = all(hp)?;
    own.extend(keys(json!({ "model_type": "kimi_linear", "norm_topk_prob": true })));
    Ok(own)
}

pub(super) fn bailingmoe3(hp: &Hyperparameters) -> Result<Keys> {
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        if hp.metadata.floats(&hp.key(key)?)?.is_some_and(|limits| limits.iter().any(|limit| *limit != 0.0)) {
            return Err(hp.unsupported("limits the activations of its experts, which is not supported"));
        }
    }
    let mut own = all(hp)?;
    own.extend(keys(json!({
        "model_type": "bailing_hybrid",
        "kda_safe_gate": hp.flag_or("kda.safe_gate", true)?,
        "kda_lower_bound": hp.float("kda.gate_lower_bound")?,
        "n_shared_experts": hp.shared_experts()?,
    })));
    Ok(own)
}

/// Without a bound in the file decays have none.
pub(super) fn glm5_next(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = all(hp)?;
    own.extend(with_indexers(hp)?);
    own.extend(hyper_connections(hp)?);
    own.extend(keys(json!({
        "model_type": "glm5_next",
        "indexer_types": indexer_types(hp)?,
        "index_kpool": hp.uint("attention.indexer.kpool")?,
        "index_kpool_always_select_tail": hp.flag_or("attention.indexer.kpool_select_tail", true)?,
        "linear_attn_config": {"safe_gate": false, "gate_lower_bound": hp.opt_float("kda.gate_lower_bound")?},
        "swiglu_limit": swiglu_limit(hp)?,
    })));
    Ok(own)
}

/// The keys of all of them. Layers without heads of keys have linear attention, with as many heads as the others.
fn all(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let kind = |heads: &i64| if *heads > 0 { "full_attention" } else { "linear_attention" };
    let mut own = latent(hp)?;
    own.extend(keys(json!({
        "layer_types": key_heads(hp)?.iter().map(kind).collect::<Vec<_>>(),
        "linear_num_heads": hp.heads()?,
        "linear_head_dim": hp.uint("kda.head_dim")?,
        "linear_conv_kernel_dim": hp.uint("ssm.conv_kernel")?,
    })));
    Ok(own)
}
