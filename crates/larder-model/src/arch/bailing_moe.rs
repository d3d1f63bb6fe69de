//! Ling: one matmul for queries, keys and values; a softmax gate in the first version, DeepSeek-V3's in the second.
//!
//! ```text
//! x += attention(rms(x))                    in the second version QK norm per head, RoPE on a part of each head
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); softmax, top k, renormalised, or the sigmoid with a
//!                                           bias for the choice within the best groups
//! logits = head(rms(x))                     columns of the head may be divided by their lengths
//! ```

use std::slice;

use larder_core::{ExpertGroups, ExpertNames, Gate, GroupRank, Renorm, Score, Weighting};

use super::bailing_hybrid::with_expert_bias;
use super::common::{AttentionBias, Basics, Defaults};
use super::deepseek_family::{FfnDefaults, FfnParts};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, InputProducts, QkNorm, Rope};
use crate::stack::Stack;
use crate::weights::{RowGroups, WeightLoader};

/// Published configs of both versions have the type of the first.
pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let named = config.opt_texts("architectures")?.unwrap_or_default().contains(&"BailingMoeV2ForCausalLM");
    let second = named || config.opt_text("score_function")? == Some("sigmoid");
    build_version(config, weights, second)
}

pub fn build_second(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    build_version(config, weights, true)
}

fn build_version(config: &mut Config, weights: &mut WeightLoader, second: bool) -> Result<Stack> {
    let mut basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-5, ..Defaults::COMMON })?;
    let (theta, partial) = if second { (6e5, Some(1.0)) } else { (1e4, None) };
    let (rope, rotary) = Rope::parse(config, basics.head_dim, theta, basics.context, partial)?;
    let bias = AttentionBias { qkv: config.flag_or("use_qkv_bias", false)?, o: config.flag_or("use_bias", !second)? };
    let (normed, gate) = if second {
        (config.flag_or("use_qk_norm", true)?, biased_gate(config)?)
    } else {
        (false, softmax_gate(config)?)
    };
    basics.unit_columns = !second && config.flag_or("norm_head", false)?;
    let split = config.flag_or("split_qkv", false)?;
    let parts =
        FfnParts::parse(config, basics.layers, FfnDefaults { dense_layers: 0, shared_experts: 0, typed: false })?;
    // Of training, or without effect in the reference.
    config.ignore(&[
        "embedding_dropout",
        "output_dropout",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
    ]);

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.attention");
        let attention = if split {
            basics.attention_as(weights, &own, "dense", basics.heads * basics.head_dim, bias, rotary)?
        } else {
            let counts = [basics.heads, basics.kv_heads, basics.kv_heads].map(|heads| heads * basics.head_dim);
            let (name, rows) = (format!("{own}.query_key_value"), counts.iter().sum());
            let parts = RowGroups::consecutive(rows, counts);
            let [q, k, v] =
                weights.linear_parts(&name, rows, basics.hidden, bias.qkv, parts.each_ref().map(slice::from_ref))?;
            let inputs = InputProducts::Apart { q, k, v: Some(v) };
            basics.attention_with(weights, inputs, &format!("{own}.dense"), bias, rotary)?
        };
        let mut norm = |name: &str| basics.norm(weights, &format!("{own}.{name}"), basics.head_dim);
        let norm =
            if normed { QkNorm::PerHead(norm("query_layernorm")?, norm("key_layernorm")?) } else { QkNorm::None };
        let layer_gate = |weights: &mut WeightLoader, prefix: &str, gate: &Gate| {
            if second { with_expert_bias(weights, prefix, gate) } else { Ok(gate.clone()) }
        };
        let ffn = parts.ffn(&basics, weights, layer, &gate, layer_gate, false)?;
        basics.layer(weights, &prefix, Attention { norm, ..attention }, ffn)
    })
}

/// The gate of the first version.
fn softmax_gate(config: &mut Config) -> Result<Gate> {
    let (experts, top_k) = (config.size(&["num_experts"])?, config.size(&["num_experts_per_tok"])?);
    config.only("score_function", "softmax");
    let renorm = config.flag_or("norm_topk_prob", true)?;
    Ok(Gate::softmax(experts, top_k, renorm && top_k > 1).checked()?)
}

/// The gate of the second version, without the bias of a layer.
fn biased_gate(config: &mut Config) -> Result<Gate> {
    config.only("use_rmsnorm", true);
    config.only("score_function", "sigmoid");
    config.ignore(&["moe_shared_expert_intermediate_size"]); // shared experts are as wide as the others
    let (experts, top_k) = (config.size(&["num_experts"])?, config.size(&["num_experts_per_tok"])?);
    let (count, keep) = (config.size_or(&["n_group"], 8)?, config.size_or(&["topk_group"], 4)?);
    let groups = ExpertGroups { count, keep, rank: GroupRank::BestTwo, masked: f32::NEG_INFINITY };
    let renorm = if top_k > 1 { Renorm::Sum { plus: 1e-20 } } else { Renorm::No };
    let weighting = Weighting::Score { renorm, scale: config.number_or("routed_scaling_factor", 1.0)? as f32 };
    let groups = Some(groups).filter(|_| count > 1);
    Ok(Gate { score: Score::Sigmoid, groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}
