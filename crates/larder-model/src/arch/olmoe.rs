//! OLMoE: queries and keys normalised over their whole projection, many narrow experts.
//!
//! ```text
//! x += attention(rms(x))                    QK norm over the whole projection, optional clip of q, k, v, RoPE
//! x += Σ_k weight · expert(rms(x))          softmax, top k
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Norm, QkNorm, Rope};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults::COMMON)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let clip = config.opt_number("clip_qkv")?;
    let experts = config.size(&["num_experts", "num_local_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", false)?).checked()?;
    let inter = config.size(&["intermediate_size"])?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let q_norm = Norm::rms(weights, &format!("{own}.q_norm"), basics.heads * basics.head_dim, basics.eps)?;
        let k_norm = Norm::rms(weights, &format!("{own}.k_norm"), basics.kv_heads * basics.head_dim, basics.eps)?;
        let attention = Attention { norm: QkNorm::Whole(q_norm, k_norm), clip, ..attention };
        let moe = basics.moe(weights, layer, &format!("{prefix}.mlp.gate"), gate.clone())?;
        basics.layer(weights, &prefix, attention, Ffn::moe(moe))
    })
}
