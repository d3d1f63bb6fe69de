//! Tensor names and configs of Granite: with experts in all layers, and the hybrid with Mamba layers.

use serde_json::json;

use crate::error::{Result, StoreError};
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, keys};
use crate::source::gguf::layer_lists::{any_layer, key_heads};
use crate::source::gguf::remap::{
    Remap::{AsChannels, AsVector, NegatedExpAsVector, Same},
    Rename,
};

pub(super) const GRANITE_PARTS: &[Rename] = &[
    ("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight", Same),
    // Gate and up of the shared expert, which the hub has in one tensor; it has no names for these.
    ("ffn_gate_shexp.weight", "shared_mlp.gate_proj.weight", Same),
    ("ffn_up_shexp.weight", "shared_mlp.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "shared_mlp.output_linear.weight", Same),
];

/// Mamba 2 of the hybrid.
pub(super) const GRANITE_MAMBA: &[Rename] = &[
    ("ssm_in.weight", "mamba.in_proj.weight", Same),
    ("ssm_conv1d.weight", "mamba.conv1d.weight", AsChannels),
    ("ssm_conv1d.bias", "mamba.conv1d.bias", Same),
    ("ssm_dt.bias", "mamba.dt_bias", Same),
    ("ssm_a", "mamba.A_log", NegatedExpAsVector),
    ("ssm_d", "mamba.D", AsVector),
    ("ssm_norm.weight", "mamba.norm.weight", AsVector),
    ("ssm_out.weight", "mamba.out_proj.weight", Same),
];

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

/// llama.cpp limits no steps of time.
pub(super) fn granite_hybrid(hp: &Hyperparameters) -> Result<Keys> {
    let (inner, heads) = (hp.uint("ssm.inner_size")?, hp.uint("ssm.time_step_rank")?);
    let whole = |a: u64, b: u64| a.checked_div(b).filter(|n| *n > 0 && n * b == a);
    let key_heads = key_heads(hp)?;
    let kind = |heads: &i64| if *heads > 0 { "attention" } else { "mamba" };
    let mut own = granite_moe(hp)?;
    own.extend(keys(json!({
        "model_type": "granitemoehybrid",
        "num_key_value_heads": key_heads.iter().max(),
        "layer_types": key_heads.iter().map(kind).collect::<Vec<_>>(),
        "position_embedding_type": if hp.flag_or("rope.scaling.finetuned", true)? { "rope" } else { "nope" },
        "mamba_n_heads": heads,
        "mamba_d_head": hp.metadata.need("ssm.inner_size of whole heads", whole(inner, heads))?,
        "mamba_expand": hp.metadata.need("ssm.inner_size of whole widths", whole(inner, hp.uint("embedding_length")?))?,
        "mamba_n_groups": hp.uint_or("ssm.group_count", 1)?,
        "mamba_d_state": hp.uint("ssm.state_size")?,
        "mamba_d_conv": hp.uint("ssm.conv_kernel")?,
        "mamba_conv_bias": any_layer(hp, "mamba.conv1d.bias")?,
    })));
    Ok(own)
}
