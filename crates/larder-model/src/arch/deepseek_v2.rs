//! DeepSeek-V2: latent attention, dense layers first, then softmax-gated experts beside shared ones.
//!
//! ```text
//! x += latent_attention(rms(x))             MLA: one latent vector per token in the KV cache; RoPE on a part of heads
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); softmax, top k, optionally within the best groups
//! ```

use larder_core::{ExpertGroups, Gate, GroupRank, Renorm, Weighting};

use super::deepseek_family::{Family, FfnDefaults, LatentDefaults, build_with};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::Rope;
use crate::ops::Rotary;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let family = Family {
        latent: LatentDefaults::COMMON,
        ffn: FfnDefaults { dense_layers: 0, shared_experts: 2, typed: false },
        rope: |config, basics, shape| {
            let (rope, rotary) = Rope::parse(config, shape.rope, 1e4, basics.context, None)?;
            Ok((rope, Rotary { interleaved: true, ..rotary }))
        },
        gate: parse_gate,
        layer_gate: |_, _, gate| Ok(gate.clone()),
        temperature: None,
        indexers: |_, _, _| Ok(None),
    };
    build_with(config, weights, family)
}

fn parse_gate(config: &mut Config) -> Result<Gate> {
    let experts = config.size(&["n_routed_experts", "num_experts", "num_local_experts"])?;
    let top_k = config.size(&["num_experts_per_tok"])?;
    let scale = config.number_or("routed_scaling_factor", 1.0)? as f32;
    let (count, keep) = (config.opt_size(&["n_group"])?, config.opt_size(&["topk_group"])?);
    config.ignore(&["norm_topk_prob"]); // the reference never normalises
    let groups = match (config.opt_text("topk_method")?.unwrap_or("greedy"), count, keep) {
        ("greedy", ..) => None,
        ("group_limited_greedy", Some(count), Some(keep)) => {
            Some(ExpertGroups { count, keep, rank: GroupRank::Best, masked: 0.0 })
        }
        ("group_limited_greedy", ..) => {
            return Err(config_error("topk_method group_limited_greedy needs n_group and topk_group"));
        }
        (other, ..) => {
            return Err(config_error(format!(
                "topk_method '{other}' is not supported for deepseek_v2; greedy and group_limited_greedy are"
            )));
        }
    };
    let weighting = Weighting::Score { renorm: Renorm::No, scale };
    Ok(Gate { groups, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?)
}
