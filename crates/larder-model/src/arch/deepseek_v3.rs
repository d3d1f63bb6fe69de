//! DeepSeek-V3: version 2 with sigmoid scores, a correction bias for the choice, and groups ranked by their best two.
//!
//! ```text
//! x += latent_attention(rms(x))             as DeepSeek-V2
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); top k of sigmoid + bias within the best groups,
//!                                           weights from the sigmoid without bias
//! ```

use larder_core::{ExpertGroups, Gate, GroupRank, Renorm, Score, Weighting};

use super::deepseek_family::{Family, FfnDefaults, LatentDefaults, build_with};
use crate::config::Config;
use crate::error::Result;
use crate::nn::Rope;
use crate::ops::Rotary;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let family = Family {
        latent: LatentDefaults::COMMON,
        ffn: FfnDefaults { dense_layers: 3, shared_experts: 1, typed: false },
        rope: |config, basics, shape| {
            let (rope, rotary) = Rope::parse(config, shape.rope, 1e4, basics.context, None)?;
            Ok((rope, Rotary { interleaved: config.flag_or("rope_interleave", true)?, ..rotary }))
        },
        gate: |config| parse_gate(config, GateDefaults { groups: 8, keep: 4, scale: 2.5, renorm: true }),
        layer_gate: with_bias,
        temperature: None,
        indexers: |_, _, _| Ok(None),
    };
    build_with(config, weights, family)
}

/// Defaults of an architecture for keys that a config does not have.
#[derive(Clone, Copy)]
pub struct GateDefaults {
    /// Groups of experts.
    pub groups: usize,
    /// Groups from which experts are chosen.
    pub keep: usize,
    /// Factor on the expert weights.
    pub scale: f64,
    /// Whether the expert weights are divided by their sum.
    pub renorm: bool,
}

/// The gate of DeepSeek-V3 and GLM-4, without the correction bias of a layer.
pub fn parse_gate(config: &mut Config, defaults: GateDefaults) -> Result<Gate> {
    let experts = config.size(&["n_routed_experts", "num_local_experts", "num_experts", "num_routed_experts"])?;
    let top_k = config.size(&["num_experts_per_tok"])?;
    parse_gate_of(config, experts, top_k, defaults)
}

/// As [`parse_gate`], for numbers of experts that have been read.
pub fn parse_gate_of(config: &mut Config, experts: usize, top_k: usize, defaults: GateDefaults) -> Result<Gate> {
    let (count, keep) =
        (config.size_or(&["n_group"], defaults.groups)?, config.size_or(&["topk_group"], defaults.keep)?);
    let renorm =
        if config.flag_or("norm_topk_prob", defaults.renorm)? { Renorm::Sum { plus: 1e-20 } } else { Renorm::No };
    let scale = config.number_or("routed_scaling_factor", defaults.scale)? as f32;
    config.only_of("scoring_func", &["sigmoid".into(), "noaux_tc".into()]); // of dots1, which names the method in both keys
    let groups = ExpertGroups { count, keep, rank: GroupRank::BestTwo, masked: f32::NEG_INFINITY };
    let groups = if count == 1 { None } else { Some(groups) };
    let weighting = Weighting::Score { renorm, scale };
    Ok(Gate { score: Score::Sigmoid, groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}

/// `gate` with the layer's correction bias, `prefix.gate.e_score_correction_bias`.
pub fn with_bias(weights: &mut WeightLoader, prefix: &str, gate: &Gate) -> Result<Gate> {
    let bias = weights.vector(&format!("{prefix}.gate.e_score_correction_bias"), &[gate.experts])?;
    Ok(Gate { bias: Some(bias), ..gate.clone() })
}
