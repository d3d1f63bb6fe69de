//! Laguna: a number of heads for each layer, a rope for each of two types of layers, attention whose output is gated.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, times the softplus of a gate per head or per value before
//!                                           the output; RoPE by the type of the layer, sliding windows in one
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += factor · Σ_k weight · expert(y) + shared(y)
//!                                           the others: y = rms(x); top k of sigmoid + bias, weights from the sigmoid,
//!                                           renormalised
//! ```

use larder_core::{ExpertNames, Gate, LayerIdx, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, TypedLayers, TypedRope, heads_of_layers, mlp_layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, Moe, MoeRouter, OutputGate, SharedExpert};
use crate::ops::GateFunction;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(8), head_dim: Some(128), tied: false };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let rope = |theta, partial| TypedRope { theta, partial };
    let typed = TypedLayers::parse(config, &basics, 512, rope(1e4, 1.0), rope(5e5, 0.5))?;
    let key = "num_attention_heads_per_layer";
    let heads = config.opt_counts(key)?.unwrap_or_else(|| vec![basics.heads; basics.layers]);
    let heads = heads_of_layers(heads, key, &basics)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let per_head = gate_per_head(config)?;
    let experts = config.size_or(&["num_experts", "num_local_experts"], 256)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 0.0 }, scale: 1.0 };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let factor = config.number_or("moe_routed_scaling_factor", 1.0)?;
    let softcap = Some(config.number_or("moe_router_logit_softcapping", 0.0)?).filter(|cap| *cap > 0.0);
    let sparse = mlp_layer_types(config, basics.layers)?.unwrap_or_else(|| (1..basics.layers).collect());
    let dense_width = config.size_or(&["intermediate_size"], 8192)?;
    let inter = config.size_or(&["moe_intermediate_size"], 512)?;
    let shared_width = config.size_or(&["shared_expert_intermediate_size"], 512)?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let first = typed.ropes[0].clone();
    let stack = basics.stack(weights, first, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let (mask, rotary) = typed.layers[layer];
        let shape = Basics { heads: heads[layer], ..basics.clone() };
        let gates = if per_head { shape.heads } else { shape.heads * shape.head_dim };
        let product = weights.linear(&format!("{own}.g_proj"), gates, basics.hidden, false)?;
        let output_gate = OutputGate::Product(product, GateFunction::Softplus);
        let attention = shape.attention(weights, &own, bias, rotary)?;
        let attention = Attention { norm: shape.qk_norm(weights, &own)?, mask, output_gate, ..attention };
        if !sparse.contains(&layer) {
            let mlp = basics.mlp(weights, &mlp, dense_width, false)?;
            return basics.layer(weights, &prefix, attention, Ffn::dense(mlp));
        }
        let bias = weights.vector(&format!("{mlp}.experts.e_score_correction_bias"), &[experts])?;
        let product = weights.linear(&format!("{mlp}.gate"), experts, basics.hidden, false)?;
        let router = match softcap {
            Some(cap) => MoeRouter::Capped(product, cap),
            None => MoeRouter::Product(product),
        };
        let gate = Gate { bias: Some(bias), ..gate.clone() };
        let moe = Moe::new(LayerIdx(layer as u16), router, gate, basics.act);
        let shared = basics.mlp(weights, &format!("{mlp}.shared_expert"), shared_width, false)?;
        let shared = Some(SharedExpert { mlp: shared, gate: None });
        basics.layer(weights, &prefix, attention, Ffn::moe(Moe { shared, factor, ..moe }))
    })?;
    Ok(Stack { ropes: typed.ropes, ..stack })
}

/// Whether the output of attention has a gate per head, and not per value.
fn gate_per_head(config: &mut Config) -> Result<bool> {
    match config.opt_text("gating") {
        Ok(None | Some("per-head")) => Ok(true),
        Ok(Some("per-element")) => Ok(false),
        Ok(Some(other)) => Err(config_error(format!(
            "gating '{other}' is not supported for laguna; supported are per-head, per-element, true and false"
        ))),
        Err(_) => config.flag_or("gating", true),
    }
}
