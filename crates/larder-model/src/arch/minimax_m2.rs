//! MiniMax-M2: grouped-query attention that normalises whole projections, experts chosen by sigmoid and bias.
//!
//! ```text
//! x += attention(rms(x))                    QK norm over the whole projection, RoPE on a part of each head
//! x += Σ_k weight · expert(rms(x))          top k of sigmoid + bias, weights from the sigmoid, renormalised
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, Norm, QkNorm, Rope};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    // Published configs count the rotated values of a head, newer ones state their share.
    let share = config.opt_size(&["rotary_dim"])?.map_or(1.0, |dim| dim as f64 / basics.head_dim as f64);
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 5e6, basics.context, Some(share))?;
    check_fixed(config)?;
    let experts = config.size_or(&["num_local_experts", "num_experts"], 256)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 0.0 }, scale: 1.0 };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let inter = config.size_or(&["intermediate_size"], 1536)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, moe) = (format!("{prefix}.self_attn"), format!("{prefix}.block_sparse_moe"));
        let attention = basics.attention(weights, &own, AttentionBias::NONE, rotary)?;
        let mut norm = |part: &str, heads: usize| {
            Norm::rms(weights, &format!("{own}.{part}"), heads * basics.head_dim, basics.eps)
        };
        let norm = QkNorm::Whole(norm("q_norm", basics.heads)?, norm("k_norm", basics.kv_heads)?);
        let bias = weights.vector(&format!("{moe}.e_score_correction_bias"), &[experts])?;
        let gate = Gate { bias: Some(bias), ..gate.clone() };
        let ffn = Ffn::moe(basics.moe(weights, layer, &format!("{moe}.gate"), gate)?);
        basics.layer(weights, &prefix, Attention { norm, ..attention }, ffn)
    })
}

/// Keys of published configs for which the reference knows one value each.
fn check_fixed(config: &mut Config) -> Result<()> {
    for (key, known) in [("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")] {
        if let Some(other) = config.opt_text(key)?.filter(|text| *text != known) {
            return Err(config_error(format!("{key} '{other}' is not supported for minimax_m2; only {known} is")));
        }
    }
    for key in ["use_qk_norm", "use_routing_bias"] {
        if !config.flag_or(key, true)? {
            return Err(config_error(format!("{key} must be true for minimax_m2")));
        }
    }
    if config.opt_counts("attn_type_list")?.is_some_and(|types| types.iter().any(|kind| *kind != 1)) {
        return Err(config_error("attn_type_list of minimax_m2 may only hold 1, softmax attention"));
    }
    if config.count_or(&["shared_intermediate_size"], 0)? != 0 {
        return Err(config_error("shared_intermediate_size must be 0: minimax_m2 has no shared experts"));
    }
    // Widths that no layer has, an unused window, and training.
    config.ignore(&["mlp_intermediate_size", "sliding_window", "router_jitter_noise"]);
    Ok(())
}
