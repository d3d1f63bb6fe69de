//! GLM-4-MoE: grouped-query attention that rotates half of each head, with DeepSeek-V3's gate.

use larder_core::ExpertNames;

use super::common::{Basics, Bias, Defaults};
use super::deepseek_v2::{Parts, PartsDefaults};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, HeadNorm, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, Some(0.5))?;
    let bias = Bias { qkv: c.flag_or("attention_bias", false)?, o: false };
    let normed = c.flag_or("use_qk_norm", false)?;
    let gate = parse_gate(c, GateDefaults { groups: 1, keep: 1, scale: 1.0 })?;
    let parts = Parts::parse(c, PartsDefaults { dense: 1, shared: 1 })?;

    let geometry = b.geometry((parts.dense..b.layers).collect(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let own = format!("{prefix}.self_attn");
        let attention = b.attention(w, &own, bias, rotary)?;
        let norm = if normed { b.head_norm(w, &own)? } else { HeadNorm::No };
        let mlp = format!("{prefix}.mlp");
        let ffn = match l < parts.dense {
            true => Ffn::Dense(b.mlp(w, &mlp, parts.dense_width, false)?),
            false => {
                let gate = with_bias(w, &mlp, &gate)?;
                Ffn::moe(parts.moe(&b, w, l, gate, false)?)
            }
        };
        b.layer(w, &prefix, Attention { norm, ..attention }, ffn)
    })
}
