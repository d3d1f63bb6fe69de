//! Configs of architectures with two types of layers, with and without sliding windows, whose heads or ropes differ.

use serde_json::{Value, json};

use crate::error::Result;
use crate::source::gguf::hyperparameters::{Hyperparameters, Keys, SIGMOID_SCORES, keys, rope_object, share};
use crate::source::gguf::layer_lists::{counts, layer_types, listed_sliding_layers, sliding_layers};

pub(super) fn mellum(hp: &Hyperparameters) -> Result<Keys> {
    hp.whole_heads_rotate()?;
    let types = Types::of(hp, sliding_layers(hp, 4)?)?;
    let mut own = types.keys()?;
    own.extend(keys(json!({
        "model_type": "mellum",
        "head_dim": hp.head_dim()?,
        "rope_parameters": types.ropes([1.0; 2], None)?,
        "intermediate_size": hp.uint_or("feed_forward_length", 1)?,
        "moe_intermediate_size": hp.expert_width()?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "norm_topk_prob": true,
    })));
    Ok(own)
}

/// llama.cpp scales the embeddings of every file by the root of their width, as published models do.
pub(super) fn afmoe(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    hp.whole_heads_rotate()?;
    hp.one_rope_base()?;
    Ok(keys(json!({
        "model_type": "afmoe",
        "head_dim": hp.head_dim()?,
        "layer_types": layer_types(&sliding_layers(hp, 4)?),
        "sliding_window": hp.uint("attention.sliding_window")?,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "num_shared_experts": hp.uint("expert_shared_count")?,
        "num_dense_layers": hp.uint_or("leading_dense_block_count", 0)?,
        "route_norm": hp.flag_or("expert_weights_norm", false)?,
        "route_scale": hp.scale()?,
        "mup_enabled": true,
    })))
}

pub(super) fn laguna(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let usual = (0..hp.layers()?).map(|layer| !layer.is_multiple_of(4)).collect();
    let types = Types::of(hp, listed_sliding_layers(hp)?.unwrap_or(usual))?;
    let (head_dim, heads) = (hp.head_dim()?, counts(hp, "attention.head_count", hp.heads()?)?);
    let rotated = hp.uint_or("rope.dimension_count", head_dim)?;
    let rotated = [rotated, hp.uint_or("rope.dimension_count_swa", rotated)?];
    let per_head = hp.rows("model.layers.0.self_attn.g_proj.weight") == heads.first().map(|n| *n as usize);
    let dense = hp.uint_or("leading_dense_block_count", 0)?;
    let kind = |layer| if layer < dense { "dense" } else { "sparse" };
    let mut own = types.keys()?;
    own.extend(keys(json!({
        "model_type": "laguna",
        "head_dim": head_dim,
        "num_attention_heads_per_layer": heads,
        "rope_parameters": types.ropes(rotated.map(|n| share(n, head_dim)), None)?,
        "gating": if per_head { "per-head" } else { "per-element" },
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "shared_expert_intermediate_size": hp.uint("expert_shared_feed_forward_length")?,
        "mlp_layer_types": (0..hp.layers()?).map(kind).collect::<Vec<_>>(),
        "num_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "moe_routed_scaling_factor": hp.scale()?,
        "attention_bias": false,
    })));
    Ok(own)
}

pub(super) fn mimo2(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let types = Types::listed(hp)?;
    let [full_kv, sliding_kv] =
        types.both("key and value heads", &counts(hp, "attention.head_count_kv", hp.heads()?)?)?;
    let head_dim = hp.uint("attention.key_length")?;
    let rotated = share(hp.uint_or("rope.dimension_count", head_dim)?, head_dim);
    let sinks = |layer: Option<usize>| {
        layer.is_some_and(|l| hp.has(&format!("model.layers.{l}.self_attn.attention_sink_bias")))
    };
    let mut own = types.keys()?;
    own.extend(keys(json!({
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": full_kv,
        "swa_num_key_value_heads": sliding_kv,
        "head_dim": head_dim,
        "v_head_dim": hp.uint("attention.value_length")?,
        "attention_value_scale": hp.opt_float("attention.value_scale")?.unwrap_or(1.0),
        "add_full_attention_sink_bias": sinks(types.first(false)),
        "add_swa_attention_sink_bias": sinks(types.first(true)),
        "rope_parameters": types.ropes([rotated; 2], None)?,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "mlp_layer_types": mlp_layer_types(hp)?,
        "n_routed_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "norm_topk_prob": true,
        "routed_scaling_factor": hp.scale()?,
        "attention_bias": hp.has("model.layers.0.self_attn.q_proj.bias"),
    })));
    Ok(own)
}

/// GGUF has no key for the share of a head that rotates in layers with full attention: it is half of that in the
/// others.
pub(super) fn step35(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    if !hp.flag_or("expert_weights_norm", true)? {
        return Err(hp.unsupported("does not normalise the weights of its experts, which its architecture does"));
    }
    let types = Types::listed(hp)?;
    let (head_dim, heads) = (hp.head_dim()?, counts(hp, "attention.head_count", hp.heads()?)?);
    let [kv_heads, _] = types.both("key and value heads", &counts(hp, "attention.head_count_kv", hp.heads()?)?)?;
    let rotated = hp.uint_or("rope.dimension_count", head_dim)?;
    let of_layer = |(layer, heads): (usize, &u64)| (layer.to_string(), json!({ "num_attention_heads": heads }));
    let mut own = types.keys()?;
    own.extend(keys(json!({
        "model_type": "step3p5",
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "per_layer_config": heads.iter().enumerate().map(of_layer).collect::<Keys>(),
        "rope_parameters": types.ropes([share(rotated / 2, head_dim), share(rotated, head_dim)], Some(rotated / 4))?,
        "intermediate_size": hp.uint("feed_forward_length")?,
        "moe_intermediate_size": hp.uint("expert_feed_forward_length")?,
        "share_expert_dim": hp.uint("expert_shared_feed_forward_length")?,
        "mlp_layer_types": mlp_layer_types(hp)?,
        "n_routed_experts": hp.uint("expert_count")?,
        "num_experts_per_tok": hp.uint("expert_used_count")?,
        "moe_router_scaling_factor": hp.scale()?,
        "swiglu_limits": hp.metadata.floats(&hp.key("swiglu_clamp_exp")?)?,
        "swiglu_limits_shared": hp.metadata.floats(&hp.key("swiglu_clamp_shexp")?)?,
        "attention_bias": false,
    })));
    Ok(own)
}

/// Which layers have sliding windows.
struct Types<'a> {
    hp: &'a Hyperparameters<'a>,
    sliding: Vec<bool>,
}

impl<'a> Types<'a> {
    /// Of the layers of the model; without a window in the file, all have full attention.
    fn of(hp: &'a Hyperparameters<'a>, mut sliding: Vec<bool>) -> Result<Self> {
        if hp.uint_or("attention.sliding_window", 0)? == 0 {
            sliding.fill(false);
        }
        Ok(Types { hp, sliding })
    }

    /// By the list of the file, which must have one.
    fn listed(hp: &'a Hyperparameters<'a>) -> Result<Self> {
        Self::of(hp, hp.metadata.need("attention.sliding_window_pattern", listed_sliding_layers(hp)?)?)
    }

    /// The first layer of a type.
    fn first(&self, sliding: bool) -> Option<usize> {
        self.sliding.iter().position(|s| *s == sliding)
    }

    /// The keys that all such architectures have.
    fn keys(&self) -> Result<Keys> {
        Ok(keys(json!({
            "layer_types": layer_types(&self.sliding),
            "sliding_window": self.hp.opt_uint("attention.sliding_window")?.filter(|width| *width > 0),
            "rope_theta": null,
            "rope_scaling": null,
        })))
    }

    /// The values of layers with full attention and of the others, which must agree within a type. A type without
    /// layers has those of the other one.
    fn both(&self, what: &str, values: &[u64]) -> Result<[u64; 2]> {
        let [full, sliding] = [false, true].map(|kind| {
            let mut own = values.iter().zip(&self.sliding).filter(|(_, s)| **s == kind).map(|(value, _)| *value);
            let first = own.next();
            first.filter(|first| own.all(|value| value == *first)).ok_or(first.is_some())
        });
        match (full, sliding) {
            (Ok(full), Ok(sliding)) => Ok([full, sliding]),
            (Ok(one), Err(false)) | (Err(false), Ok(one)) => Ok([one; 2]),
            _ => Err(self.hp.unsupported(format!("has layers of one type with different numbers of {what}"))),
        }
    }

    /// The config's `rope_parameters`; `shares` of a head rotate in layers with full attention and in the others. Only
    /// the first are scaled, if by divisors in the file, by the first `divisors` of them.
    fn ropes(&self, shares: [f64; 2], divisors: Option<u64>) -> Result<Value> {
        let base = self.hp.opt_float("rope.freq_base")?.unwrap_or(10000.0);
        let mut full = rope_object(self.hp.rope_scaling_of(divisors)?);
        full.extend(keys(json!({ "rope_theta": base, "partial_rotary_factor": shares[0] })));
        let base = self.hp.opt_float("rope.freq_base_swa")?.unwrap_or(base);
        let sliding = json!({ "rope_type": "default", "rope_theta": base, "partial_rotary_factor": shares[1] });
        Ok(json!({ "full_attention": full, "sliding_attention": sliding }))
    }
}

/// For each layer, whether it has experts: by the tensors.
fn mlp_layer_types(hp: &Hyperparameters) -> Result<Vec<&'static str>> {
    let dense = |layer| hp.has(&format!("model.layers.{layer}.mlp.gate_proj.weight"));
    Ok((0..hp.layers()?).map(|layer| if dense(layer) { "dense" } else { "sparse" }).collect())
}
