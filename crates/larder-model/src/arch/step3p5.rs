//! Step-3.5 and the text part of Step-3.7: heads per type of layer, a gate per head, matmuls clamped in some layers.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, times the sigmoid of a gate per head before the output; RoPE
//!                                           by the type of the layer, sliding windows in one
//! x += mlp(rms(x))                          first layers; in all, gate and up may be clamped after the activation
//! x += factor · Σ_k weight · expert(y) + shared(y)
//!                                           the others: y = rms(x); top k of sigmoid + bias, weights from the sigmoid,
//!                                           renormalised
//! ```

use larder_core::{ExpertNames, Gate, Renorm, RowPick, Score, TensorSlice, Weighting};

use super::common::{
    AttentionBias, Basics, Defaults, heads_of_layers, mlp_layer_types, per_layer_config, sliding_window,
};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Moe, OutputGate, Rope, RopeType, SharedExpert};
use crate::ops::{Activation, GateFunction, Rotary};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let groups = config.size_or(&["num_attention_groups"], 8)?;
    let defaults = Defaults { eps: 1e-5, kv_heads: Some(groups), head_dim: Some(128), tied: false };
    let basics = Basics { norms_less_one: true, ..Basics::parse(config, "rms_norm_eps", defaults)? };
    for part in ["norm_expert_weight", "use_head_wise_attn_gate", "use_moe", "use_moe_router_bias", "zero_centered"] {
        config.only(part, true);
    }
    config.only("att_impl_type", "GQA");
    config.only("n_shared_experts", 1);
    config.only("moe_router_activation", "sigmoid");
    // The reference has no use for these.
    config.ignore(&["max_seq_len", "moe_every_n_layer", "moe_layer_offset", "yarn_only_types"]);
    let sliding = sliding_layers(config, basics.layers)?;
    let heads = heads(config, &basics, &sliding)?;
    let (ropes, rotaries) = ropes(config, &basics, &sliding)?;
    let window = config.opt_size(&["sliding_window"])?;
    if window.is_none() && sliding.contains(&true) {
        return Err(config_error("sliding_window is missing, but layer_types names layers with sliding_attention"));
    }
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let scale = config.positive_or("query_pre_attn_scalar", basics.head_dim as f64)?.powf(-0.5);
    let experts = config.size_or(&["n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts"], 288)?;
    let top_k = config.size_or(&["num_experts_per_tok", "moe_top_k"], 8)?;
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 0.0 }, scale: 1.0 };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let factor = config.number_or("moe_router_scaling_factor", 1.0)?;
    let sparse = sparse_layers(config, basics.layers)?;
    let routed_act = activations(config, "swiglu_limits", basics.layers)?;
    let dense_act = activations(config, "swiglu_limits_shared", basics.layers)?;
    let dense_width = config.size_or(&["intermediate_size"], 11264)?;
    let inter = config.size_or(&["moe_intermediate_size"], 1280)?;
    let shared_width = config.size_or(&["share_expert_dim", "share_expert_dims"], 1280)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let all = |name| TensorSlice::stacked(format!("model.layers.{{l}}.moe.{name}.weight"), false, RowPick::All);
    let names = ExpertNames { matrices: ["gate_proj", "up_proj", "down_proj"].map(all).into(), bias: None };
    let stack = basics.stack(weights, ropes[0].clone(), geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let shape = Basics { heads: heads[layer], act: dense_act[layer], ..basics.clone() };
        let attention = shape.attention(weights, &own, bias, rotaries[usize::from(sliding[layer])])?;
        let product = weights.linear(&format!("{own}.g_proj"), shape.heads, basics.hidden, false)?;
        let output_gate = OutputGate::Product(product, GateFunction::Sigmoid);
        let mask = if sliding[layer] { sliding_window(window) } else { AttentionMask::Causal };
        let attention = Attention { norm: shape.qk_norm(weights, &own)?, mask, scale, output_gate, ..attention };
        if !sparse.contains(&layer) {
            let mlp = shape.mlp(weights, &format!("{prefix}.mlp"), dense_width, mlp_bias)?;
            return basics.layer(weights, &prefix, attention, Ffn::dense(mlp));
        }
        let bias = Some(weights.vector(&format!("{prefix}.moe.router_bias"), &[experts])?);
        let moe = basics.moe(weights, layer, &format!("{prefix}.moe.gate"), Gate { bias, ..gate.clone() })?;
        let mlp = shape.mlp(weights, &format!("{prefix}.share_expert"), shared_width, mlp_bias)?;
        let shared = Some(SharedExpert { mlp, gate: None });
        basics.layer(weights, &prefix, attention, Ffn::moe(Moe { act: routed_act[layer], shared, factor, ..moe }))
    })?;
    Ok(Stack { ropes, ..stack })
}

/// For each layer, whether it has a sliding window. The lists of older configs go on with the layers for drafts.
fn sliding_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let Some(types) = config.opt_texts("layer_types")? else { return Ok(vec![false; layers]) };
    let known = ["full_attention", "sliding_attention"];
    if types.len() >= layers && types.iter().all(|kind| known.contains(kind)) {
        Ok(types[..layers].iter().map(|kind| *kind == known[1]).collect())
    } else {
        Err(config_error(format!("layer_types must be {} for each of {layers} layers", known.join(" or "))))
    }
}

/// The query heads of each layer: those of sliding layers by keys of their own, or each by `per_layer_config`.
fn heads(config: &mut Config, basics: &Basics, sliding: &[bool]) -> Result<Vec<usize>> {
    let mut of_sliding = basics.heads;
    if let Some(mut other) = config.opt_object("attention_other_setting", "attention_other_setting.")? {
        of_sliding = other.size_or(&["num_attention_heads"], basics.heads)?;
        let kv_heads = other.size_or(&["num_attention_groups"], basics.kv_heads)?;
        if (kv_heads, other.size_or(&["head_dim"], basics.head_dim)?) != (basics.kv_heads, basics.head_dim) {
            return Err(config_error("attention_other_setting may differ in num_attention_heads only"));
        }
        other.ignore(&["attention_type", "true_head_dim"]);
        other.finish();
    }
    let of_sliding = config.size_or(&["num_sliding_attention_heads"], of_sliding)?;
    let mut heads = vec![basics.heads; basics.layers];
    let given = per_layer_config(config, basics.layers, |layer, own| {
        heads[layer] = own.size_or(&["num_attention_heads"], basics.heads)?;
        Ok(())
    })?;
    if !given {
        heads.iter_mut().zip(sliding).filter(|(_, slides)| **slides).for_each(|(heads, _)| *heads = of_sliding);
    }
    heads_of_layers(heads, "num_attention_heads, or num_sliding_attention_heads,", basics)
}

/// The ropes of layers with full attention and of the others; older configs state a rope per layer.
fn ropes(config: &mut Config, basics: &Basics, sliding: &[bool]) -> Result<(Vec<Rope>, Vec<Rotary>)> {
    let (theta, thetas) = if config.is_list("rope_theta") {
        (1e4, config.opt_numbers("rope_theta")?)
    } else {
        (config.number_or("rope_theta", 1e4)?, None)
    };
    let partials = config.opt_numbers("partial_rotary_factors")?;
    let kind = |slides: bool, name, prefix, older| -> Result<RopeType> {
        let first = sliding.iter().position(|s| *s == slides).unwrap_or(0);
        let of = |list: &Option<Vec<f64>>, default| {
            let value = list.as_ref().map_or(Some(default), |list| list.get(first).copied());
            value.ok_or_else(|| config_error("rope_theta or partial_rotary_factors has too few entries"))
        };
        let (theta, partial) = (of(&thetas, theta)?, of(&partials, 1.0)?);
        Ok(RopeType { name, prefix, older, head_dim: basics.head_dim, theta, partial, amplitude: None })
    };
    let kinds = [
        kind(false, "full_attention", "rope_parameters.full_attention.", Some("rope_scaling"))?,
        kind(true, "sliding_attention", "rope_parameters.sliding_attention.", None)?,
    ];
    Ok(Rope::parse_types(config, &kinds, basics.context)?.into_iter().unzip())
}

/// The layers with experts: by `mlp_layer_types`, by `moe_layers_enum`, or all but the first three or as many as the
/// config says.
fn sparse_layers(config: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let dense = config.count_or(&["first_k_dense_replace"], 3)?;
    let listed = config.opt_counts_or_text("moe_layers_enum")?.unwrap_or_else(|| (dense..layers).collect());
    let listed = (0..layers).filter(|layer| listed.contains(layer)).collect();
    Ok(mlp_layer_types(config, layers)?.unwrap_or(listed))
}

/// The activation function of each layer: clamped where the list has a number other than 0.
fn activations(config: &mut Config, name: &str, layers: usize) -> Result<Vec<Activation>> {
    let limits = config.opt_numbers_or(name, 0.0)?.unwrap_or_else(|| vec![0.0; layers]);
    if limits.len() < layers || limits.iter().any(|limit| *limit < 0.0) {
        return Err(config_error(format!("{name} must have a number, at least 0, for each of {layers} layers")));
    }
    let of = |limit: &f64| match *limit as f32 {
        0.0 => Activation::Silu,
        limit => Activation::LimitedSilu { limit },
    };
    Ok(limits[..layers].iter().map(of).collect())
}
