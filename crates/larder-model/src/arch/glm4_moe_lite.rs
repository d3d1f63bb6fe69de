//! GLM-4-MoE-Lite (GLM-4.7-Flash): the latent attention of DeepSeek with the gate of GLM-4-MoE.
//!
//! ```text
//! x += latent_attention(rms(x))             as DeepSeek-V3
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use super::deepseek_family::{Family, FfnDefaults, LatentDefaults, build_with};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::Rope;
use crate::ops::Rotary;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let family = Family {
        latent: LatentDefaults::COMMON,
        ffn: FfnDefaults { dense_layers: 1, shared_experts: 1, typed: true },
        rope: |config, basics, shape| {
            let (rope, rotary) = Rope::parse(config, shape.rope, 1e4, basics.context, Some(1.0))?;
            if rotary.dim != shape.rope {
                return Err(config_error("partial_rotary_factor must be 1 for glm4_moe_lite"));
            }
            Ok((rope, Rotary { interleaved: config.flag_or("rope_interleave", true)?, ..rotary }))
        },
        gate: |config| parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 1.8, renorm: true }),
        layer_gate: with_bias,
        temperature: None,
        indexers: |_, _, _| Ok(None),
    };
    build_with(config, weights, family)
}
