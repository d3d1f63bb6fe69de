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
    config.only("qk_norm_type", "per_layer");
    // Factors of another version's residuals, and the form of shared experts, of which there are none.
    for key in ["layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"] {
        config.only(key, 1);
    }
    config.ignore(&["shared_moe_mode"]);
    if config.opt_counts("attn_type_list")?.is_some_and(|types| types.iter().any(|kind| *kind != 1)) {
        return Err(config_error("attn_type_list of minimax_m2 may only hold 1, softmax attention"));
    }
    config.ignore(&["mlp_intermediate_size", "sliding_window"]); // widths that no layer has, and an unused window
    Ok(())
}
