//! Hy3: grouped-query attention with QK norm per head, experts chosen by sigmoid and bias, shared experts.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, RoPE
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); top k of sigmoid + bias, weights from the sigmoid,
//!                                           renormalised and scaled
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, mlp_layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, Rope, SharedExpert};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 11_158_840.0, basics.context, None)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size_or(&["num_experts", "num_local_experts"], 192)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let scale = config.number_or("router_scaling_factor", 2.826)? as f32;
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 1e-20 }, scale };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let dense_width = config.size_or(&["intermediate_size"], 13312)?;
    let inter = config.size_or(&["moe_intermediate_size"], 1536)?;
    let shared = config.count_or(&["num_shared_experts"], 1)?;
    let mlp_bias = config.flag_or("mlp_bias", false)?;
    let sparse = sparse_layers(config, basics.layers)?;
    config.only("moe_router_use_sigmoid", true);

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let attention = Attention { norm: basics.qk_norm(weights, &own)?, ..attention };
        let ffn = if basics.has_experts(&sparse, layer) {
            let bias = weights.vector(&format!("{mlp}.expert_bias"), &[experts])?;
            let gate = Gate { bias: Some(bias), ..gate.clone() };
            let mut moe = basics.moe(weights, layer, &format!("{mlp}.router.gate"), gate)?;
            if shared > 0 {
                let mlp = basics.mlp(weights, &format!("{mlp}.shared_mlp"), shared * inter, mlp_bias)?;
                moe.shared = Some(SharedExpert { mlp, gate: None });
            }
            Ffn::moe(moe)
        } else {
            Ffn::dense(basics.mlp(weights, &mlp, dense_width, mlp_bias)?)
        };
        basics.layer(weights, &prefix, attention, ffn)
    })
}

/// The layers with experts: all but the first, unless `mlp_layer_types` says otherwise.
fn sparse_layers(config: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let given = mlp_layer_types(config, layers)?;
    match config.opt_count(&["first_k_dense_replace"])? {
        Some(dense) if given.is_none() && dense != 1 => Err(config_error(format!(
            "first_k_dense_replace {dense} is not supported for hy_v3 without mlp_layer_types; only 1 is"
        ))),
        _ => Ok(given.unwrap_or_else(|| (1..layers).collect())),
    }
}
