//! Mistral 4: the latent attention of DeepSeek with queries scaled up by position, and a softmax gate.
//!
//! ```text
//! x += latent_attention(rms(x))             as DeepSeek-V3; queries times 1 + beta · ln(1 + ⌊position / trained⌋)
//! x += mlp(rms(x))                          first layers, usually none
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); softmax, top k within the best groups
//! ```

use larder_core::{ExpertGroups, Gate, GroupRank, Renorm, Weighting};

use super::deepseek_family::{Family, FfnDefaults, LatentDefaults, build_with};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{AttentionTemperature, Rope};
use crate::ops::Rotary;
use crate::stack::Stack;
use crate::weights::WeightLoader;

/// Keys of `rope_parameters` that are not about the rotation.
const OTHER_KEYS: &[&str] = &["llama_4_scaling_beta", "max_position_embeddings"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    config.ignore(&["head_dim", "topk_method"]); // the sum of a query's parts; the reference knows one method
    let family = Family {
        latent: LatentDefaults::COMMON,
        ffn: FfnDefaults { dense_layers: 0, shared_experts: 1, typed: false },
        rope: |config, basics, shape| {
            let width = shape.nope + shape.rope;
            let share = shape.rope as f64 / width as f64;
            let (rope, rotary) = Rope::parse_beside(config, width, 1e4, basics.context, Some(share), OTHER_KEYS)?;
            if rotary.dim != shape.rope {
                return Err(config_error("partial_rotary_factor differs from the share of qk_rope_head_dim"));
            }
            Ok((rope, Rotary { interleaved: config.flag_or("rope_interleave", true)?, ..rotary }))
        },
        gate: parse_gate,
        layer_gate: |_, _, gate| Ok(gate.clone()),
        temperature: temperature(config)?,
        indexers: |_, _, _| Ok(None),
    };
    build_with(config, weights, family)
}

fn temperature(config: &mut Config) -> Result<Option<AttentionTemperature>> {
    let Some(mut rope) = config.opt_object("rope_parameters", "rope_parameters.")? else {
        return Err(config_error("rope_parameters is missing; mistral4 needs it"));
    };
    let scale = rope.number("llama_4_scaling_beta")?;
    let floor = rope.size(&["original_max_position_embeddings"])? as f64;
    Ok(Some(AttentionTemperature { floor, scale, first: 0 }))
}

fn parse_gate(config: &mut Config) -> Result<Gate> {
    let experts = config.size_or(&["n_routed_experts", "num_local_experts"], 128)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 4)?;
    let (count, keep) = (config.size_or(&["n_group"], 1)?, config.size_or(&["topk_group"], 1)?);
    let renorm = if config.flag_or("norm_topk_prob", true)? { Renorm::Sum { plus: 1e-20 } } else { Renorm::No };
    let scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    let groups = ExpertGroups { count, keep, rank: GroupRank::BestTwo, masked: 0.0 };
    let groups = if count == 1 { None } else { Some(groups) };
    let weighting = Weighting::Score { renorm, scale };
    Ok(Gate { groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}
