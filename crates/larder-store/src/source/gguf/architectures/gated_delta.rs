//! Configs of models with layers of the gated delta rule: Qwen3-Next and Qwen3.5.

use serde_json::json;

use crate::{
    error::Result,
    source::gguf::hyperparameters::{Hyperparameters, Keys, keys},
};

pub(super) fn qwen3_next(hp: &Hyperparameters) -> Result<Keys> {
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

pub(super) fn qwen35_moe(hp: &Hyperparameters) -> Result<Keys> {
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
