//! Tensor names and configs of models with state-space layers: Granite hybrid, Jamba and Nemotron-H.

use serde_json::json;

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, keys};
use crate::source::gguf::layer_lists::{any_layer, key_heads};
use crate::source::gguf::remap::{
    Remap::{AsChannels, AsVector, NegatedExp, NegatedExpAsVector, Same},
    Rename,
};

/// Mamba 1 of Jamba, and the parts beside it.
pub(super) const JAMBA_PARTS: &[Rename] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("ssm_in.weight", "mamba.in_proj.weight", Same),
    ("ssm_conv1d.weight", "mamba.conv1d.weight", AsChannels),
    ("ssm_conv1d.bias", "mamba.conv1d.bias", Same),
    ("ssm_x.weight", "mamba.x_proj.weight", Same),
    ("ssm_dt_norm.weight", "mamba.dt_layernorm.weight", Same),
    ("ssm_b_norm.weight", "mamba.b_layernorm.weight", Same),
    ("ssm_c_norm.weight", "mamba.c_layernorm.weight", Same),
    ("ssm_dt.weight", "mamba.dt_proj.weight", Same),
    ("ssm_dt.bias", "mamba.dt_proj.bias", Same),
    ("ssm_a", "mamba.A_log", NegatedExp),
    ("ssm_d", "mamba.D", Same),
    ("ssm_out.weight", "mamba.out_proj.weight", Same),
    ("ffn_norm.weight", "pre_ff_layernorm.weight", Same),
    ("ffn_gate_inp.weight", "feed_forward.router.weight", Same),
    ("ffn_gate.weight", "feed_forward.gate_proj.weight", Same),
    ("ffn_up.weight", "feed_forward.up_proj.weight", Same),
    ("ffn_down.weight", "feed_forward.down_proj.weight", Same),
];

pub(super) const JAMBA_OUTER: &[Rename] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.final_layernorm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

/// The layers of Nemotron-H, each of which has one of the parts.
pub(super) const NEMOTRON_LAYER: &[Rename] = &[
    ("attn_norm.weight", "norm.weight", Same),
    ("ssm_in.weight", "mixer.in_proj.weight", Same),
    ("ssm_conv1d.weight", "mixer.conv1d.weight", AsChannels),
    ("ssm_conv1d.bias", "mixer.conv1d.bias", Same),
    ("ssm_dt.bias", "mixer.dt_bias", Same),
    ("ssm_a", "mixer.A_log", NegatedExpAsVector),
    ("ssm_d", "mixer.D", AsVector),
    ("ssm_norm.weight", "mixer.norm.weight", AsVector),
    ("ssm_out.weight", "mixer.out_proj.weight", Same),
    ("attn_q.weight", "mixer.q_proj.weight", Same),
    ("attn_k.weight", "mixer.k_proj.weight", Same),
    ("attn_v.weight", "mixer.v_proj.weight", Same),
    ("attn_output.weight", "mixer.o_proj.weight", Same),
    ("ffn_gate_inp.weight", "mixer.gate.weight", Same),
    ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", Same),
    ("ffn_latent_down.weight", "mixer.fc1_latent_proj.weight", Same),
    ("ffn_latent_up.weight", "mixer.fc2_latent_proj.weight", Same),
    ("ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight", Same),
    ("ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight", Same),
    ("ffn_up.weight", "mixer.up_proj.weight", Same),
    ("ffn_up.bias", "mixer.up_proj.bias", Same),
    ("ffn_down.weight", "mixer.down_proj.weight", Same),
    ("ffn_down.bias", "mixer.down_proj.bias", Same),
];

/// Layers with attention and with experts, which the config states by a period and an offset.
pub(super) fn jamba(hp: &Hyperparameters) -> Result<Keys> {
    let key_heads = key_heads(hp)?;
    let attends: Vec<bool> = key_heads.iter().map(|heads| *heads > 0).collect();
    let router = |layer| hp.has(&format!("model.layers.{layer}.feed_forward.router.weight"));
    let sparse: Vec<bool> = (0..hp.layers()?).map(router).collect();
    let regular = |layers: &[bool], what: &str| {
        period(layers).ok_or_else(|| hp.unsupported(format!("has layers with {what} that do not recur regularly")))
    };
    let (attention, experts) = (regular(&attends, "attention")?, regular(&sparse, "experts")?);
    let inner = hp.uint("ssm.inner_size")?;
    let expand = inner.checked_div(hp.uint("embedding_length")?);
    Ok(keys(json!({
        "model_type": "jamba",
        "num_key_value_heads": key_heads.iter().max().filter(|heads| **heads > 0),
        "intermediate_size": hp.uint("feed_forward_length")?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "attn_layer_period": attention.0,
        "attn_layer_offset": attention.1,
        "expert_layer_period": experts.0,
        "expert_layer_offset": experts.1,
        "mamba_expand": hp.metadata.need("ssm.inner_size of whole widths", expand)?,
        "mamba_d_state": hp.uint("ssm.state_size")?,
        "mamba_d_conv": hp.uint("ssm.conv_kernel")?,
        "mamba_dt_rank": hp.uint("ssm.time_step_rank")?,
        "mamba_conv_bias": any_layer(hp, "mamba.conv1d.bias")?,
        "rope_theta": null,
        "rope_scaling": null,
    })))
}

/// The period of the layers that are marked, and the offset of the first of them; `None` if they do not recur with a
/// period.
fn period(marked: &[bool]) -> Option<(usize, usize)> {
    let mut places = (0..marked.len()).filter(|layer| marked[*layer]);
    let offset = places.next().unwrap_or(marked.len());
    let period = places.next().map_or(marked.len() + 1, |second| second - offset);
    let regular = offset < period && (0..marked.len()).all(|layer| marked[layer] == (layer % period == offset));
    regular.then_some((period, offset))
}

/// What a layer of Nemotron-H has is told by its tensors. llama.cpp limits no steps of time.
pub(super) fn nemotron_h(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let parts = [("gate", "moe"), ("q_proj", "attention"), ("in_proj", "mamba"), ("up_proj", "mlp")];
    let has = |layer: u64, part: &str| hp.has(&format!("model.layers.{layer}.mixer.{part}.weight"));
    let kind = |layer| parts.iter().find(|(part, _)| has(layer, part)).map(|(_, kind)| *kind);
    let kinds: Option<Vec<&str>> = (0..hp.layers()?).map(kind).collect();
    let dense = (0..hp.layers()?).find_map(|layer| hp.rows(&format!("model.layers.{layer}.mixer.up_proj.weight")));
    let (inner, heads) = (hp.uint("ssm.inner_size")?, hp.uint("ssm.time_step_rank")?);
    Ok(keys(json!({
        "model_type": "nemotron_h",
        "layers_block_type": hp.metadata.need("layers of known types", kinds)?,
        "num_key_value_heads": key_heads(hp)?.iter().max().filter(|heads| **heads > 0),
        "head_dim": hp.head_dim()?,
        "rms_norm_eps": null,
        "layer_norm_epsilon": hp.rms_epsilon()?,
        "hidden_act": null,
        "mlp_bias": any_layer(hp, "mixer.up_proj.bias")?,
        "intermediate_size": dense,
        "mamba_num_heads": heads,
        "mamba_head_dim": hp.metadata.need("ssm.inner_size of whole heads", inner.checked_div(heads))?,
        "n_groups": hp.uint("ssm.group_count")?,
        "ssm_state_size": hp.uint("ssm.state_size")?,
        "conv_kernel": hp.uint("ssm.conv_kernel")?,
        "use_conv_bias": any_layer(hp, "mixer.conv1d.bias")?,
        "time_step_min": 0.0,
        "n_routed_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "moe_shared_expert_intermediate_size": hp.uint("expert_shared_feed_forward_length")?,
        "moe_latent_size": hp.opt_uint("moe_latent_size")?.filter(|width| *width > 0),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": hp.flag_or("expert_weights_norm", false)?,
        "routed_scaling_factor": hp.scale()?,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_layers_recur_with_a_period() {
        let of = |layers: &str| period(&layers.chars().map(|layer| layer == 'x').collect::<Vec<_>>());
        assert_eq!(of("..x...x...x."), Some((4, 2)));
        assert_eq!((of("xxx"), of("x.x.x"), of(".x.x")), (Some((1, 0)), Some((2, 0)), Some((2, 1))));
        assert_eq!((of("...."), of("..x."), of("...x")), (Some((5, 4)), Some((5, 2)), Some((5, 3))));
        assert_eq!((of(".x..xx"), of("..x.x"), of("xx.")), (None, None, None));
    }
}
