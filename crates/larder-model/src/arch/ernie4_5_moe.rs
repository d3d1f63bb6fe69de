//! ERNIE-4.5-MoE: RoPE on adjacent pairs, a correction bias for the choice, a configurable range of layers with
//! experts.
//!
//! ```text
//! x += attention(rms(x))                    grouped queries, RoPE on adjacent pairs
//! x += Σ_k weight · expert(y) + shared(y)   y = rms(x); top k of softmax + bias, weights from the softmax without bias
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Weighting};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Moe, Rope, SharedExpert};
use crate::ops::Rotary;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let mut basics =
        Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(4), tied: true, ..Defaults::COMMON })?;
    let bias = config.flag_or("use_bias", false)?;
    basics.head_bias = bias;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 5e5, basics.context, None)?;
    let rotary = Rotary { interleaved: true, ..rotary };
    let experts = config.size(&["moe_num_experts", "num_experts", "num_local_experts"])?;
    let top_k = config.size(&["moe_k", "num_experts_per_tok"])?;
    let renorm = Renorm::Floor { min: config.number_or("moe_norm_min", 1e-12)? as f32 };
    let weighting = Weighting::Score { renorm, scale: 1.0 };
    let gate = Gate { weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let sparse = sparse_layers(config, basics.layers)?;
    config.ignore(&["moe_capacity", "moe_gate", "moe_use_aux_free"]); // training only
    let dense_width = config.size(&["intermediate_size"])?;
    let inter = config.size(&["moe_intermediate_size"])?;
    let shared = config.count_or(&["moe_num_shared_experts"], 2)?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), AttentionBias::all(bias), rotary)?;
        let mlp = format!("{prefix}.mlp");
        if !sparse.contains(&layer) {
            let dense = basics.mlp(weights, &mlp, dense_width, bias)?;
            return basics.layer(weights, &prefix, attention, Ffn::dense(dense));
        }
        let correction = weights.vector(&format!("{mlp}.moe_statics.e_score_correction_bias"), &[1, experts])?;
        let gate = Gate { bias: Some(correction), ..gate.clone() };
        let moe = basics.moe(weights, layer, &format!("{mlp}.gate"), gate)?;
        let shared = match shared {
            0 => None,
            n => Some(SharedExpert {
                mlp: basics.mlp(weights, &format!("{mlp}.shared_experts"), inter * n, bias)?,
                gate: None,
            }),
        };
        basics.layer(weights, &prefix, attention, Ffn::moe(Moe { shared, ..moe }))
    })
}

fn sparse_layers(config: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let start = config.count_or(&["moe_layer_start_index"], 1)?;
    let end = config.number_or("moe_layer_end_index", -1.0)?;
    let end = if end < 0.0 { layers.saturating_sub(1) } else { end as usize };
    let interval = config.size_or(&["moe_layer_interval"], 1)?;
    Ok((start..layers.min(end.saturating_add(1))).filter(|layer| (layer + 1).is_multiple_of(interval)).collect())
}
