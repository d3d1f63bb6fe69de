//! Solar Open: plain grouped-query attention, DeepSeek-V3's gate and shared experts in every layer.
//!
//! ```text
//! x += attention(rms(x))                    grouped queries, RoPE
//! x += Σ_k weight · expert(y) + shared(y)   y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::ExpertNames;

use super::common::{AttentionBias, Basics, Defaults};
use super::deepseek_family::FfnParts;
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::Rope;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e6, basics.context, Some(1.0))?;
    if rotary.dim != basics.head_dim {
        return Err(config_error("partial_rotary_factor must be 1 for solar_open"));
    }
    let bias = AttentionBias { qkv: config.flag_or("attention_bias", false)?, o: false };
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 1.0, renorm: true })?;
    config.only("first_k_dense_replace", 0);
    config.ignore(&["intermediate_size"]); // of dense layers
    let parts = FfnParts {
        name: "mlp",
        sparse: (0..basics.layers).collect(),
        dense_width: 0,
        inter: config.size_or(&["moe_intermediate_size"], 1280)?,
        shared_experts: config.count_or(&["n_shared_experts"], 1)?,
    };

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        basics.layer(weights, &prefix, attention, ffn)
    })
}
