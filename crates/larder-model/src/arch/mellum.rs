//! Mellum 2: Qwen3-MoE with a rope for each of its two types of layers.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head; RoPE by the type of the layer, sliding windows in one
//! x += Σ_k weight · expert(rms(x))          softmax, top k
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, TypedLayers, TypedRope, mlp_layer_types};
use crate::config::Config;
use crate::error::Result;
use crate::nn::Attention;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(4), head_dim: Some(128), tied: false };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let rope = |theta| TypedRope { theta, partial: 1.0 };
    let typed = TypedLayers::parse(config, &basics, 1024, rope(1e4), rope(5e5))?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size_or(&["num_experts", "num_local_experts"], 64)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", true)?).checked()?;
    let sparse = mlp_layer_types(config, basics.layers)?.unwrap_or_else(|| (0..basics.layers).collect());
    let dense_width = config.size_or(&["intermediate_size"], 7168)?;
    let inter = config.size_or(&["moe_intermediate_size"], 896)?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let first = typed.ropes[0].clone();
    let stack = basics.stack(weights, first, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let (mask, rotary) = typed.layers[layer];
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let attention = Attention { norm: basics.qk_norm(weights, &own)?, mask, ..attention };
        let ffn = if sparse.contains(&layer) {
            Ffn::moe(basics.moe(weights, layer, &format!("{prefix}.mlp.gate"), gate.clone())?)
        } else {
            Ffn::dense(basics.mlp(weights, &format!("{prefix}.mlp"), dense_width, false)?)
        };
        basics.layer(weights, &prefix, attention, ffn)
    })?;
    Ok(Stack { ropes: typed.ropes, ..stack })
}
