//! Mixtral: grouped-query attention and a few wide experts, whose weights always sum to one.
//!
//! ```text
//! x += attention(rms(x))                    grouped queries, RoPE, sliding window if the config has one
//! x += Σ_k weight · expert(rms(x))          softmax over the logits, top k, weights renormalised to sum 1
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, sliding_window};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Rope};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e6, basics.context, None)?;
    let mask = sliding_window(config.opt_size(&["sliding_window"])?);
    let experts = config.size(&["num_local_experts", "num_experts"])?;
    let gate = Gate::softmax(experts, config.size_or(&["num_experts_per_tok"], 2)?, true).checked()?;
    let inter = config.size(&["intermediate_size"])?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, gate.top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), AttentionBias::NONE, rotary)?;
        let moe = basics.moe(weights, layer, &format!("{prefix}.block_sparse_moe.gate"), gate.clone())?;
        basics.layer(weights, &prefix, Attention { mask, ..attention }, Ffn::moe(moe))
    })
}
