//! GLM-4-MoE: grouped-query attention that rotates half of each head, with DeepSeek-V3's gate.
//!
//! ```text
//! x += attention(rms(x))                    grouped queries, optional QK norm per head, RoPE on half of each head
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::ExpertNames;

use super::common::{AttentionBias, Basics, Defaults};
use super::deepseek_family::{FfnDefaults, FfnParts};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, QkNorm, Rope};
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, Some(0.5))?;
    let bias = AttentionBias { qkv: config.flag_or("attention_bias", false)?, o: false };
    let normed = config.flag_or("use_qk_norm", false)?;
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 1.0, renorm: true })?;
    let defaults = FfnDefaults { dense_layers: 1, shared_experts: 1, typed: false };
    let parts = FfnParts::parse(config, basics.layers, defaults)?;

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let norm = if normed { basics.qk_norm(weights, &own)? } else { QkNorm::None };
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        basics.layer(weights, &prefix, Attention { norm, ..attention }, ffn)
    })
}
