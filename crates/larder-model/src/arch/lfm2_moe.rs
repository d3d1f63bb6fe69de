//! LFM2-MoE: short convolutions in most layers, attention in a few, sigmoid-gated experts after the dense layers.
//!
//! ```text
//! x += short_conv(rms(x))                   most layers
//! x += attention(rms(x))                    the others: QK norm per head, RoPE
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(rms(x))          the others: top k of sigmoid + bias, weights from the sigmoid without bias
//! ```

use std::slice;

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, CausalConv, Mixer, Mlp, MlpNames, Norm, QkNorm, Rope, ShortConv};
use crate::ops::{Activation, Rotary};
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::{RowGroups, WeightLoader};

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let mut basics = Basics::parse(config, "norm_eps", Defaults { kv_heads: Some(8), tied: true, ..Defaults::COMMON })?;
    if basics.act != Activation::Silu {
        return Err(config_error("hidden_act must be silu for lfm2_moe"));
    }
    basics.tied = config.flag_or("tie_embedding", basics.tied)?; // an older key, which takes precedence
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e6, basics.context, None)?;
    let types = layer_types(config, basics.layers, &["conv", "full_attention"])?
        .ok_or_else(|| config_error("layer_types is missing"))?;
    let (width, bias) = (config.size_or(&["conv_L_cache"], 3)?, config.flag_or("conv_bias", false)?);
    let experts = config.size(&["num_experts", "num_local_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok"], 4)?;
    let renorm = if config.flag_or("norm_topk_prob", true)? { Renorm::Sum { plus: 1e-6 } } else { Renorm::No };
    let weighting = Weighting::Score { renorm, scale: config.number_or("routed_scaling_factor", 1.0)? as f32 };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let corrected = config.flag_or("use_expert_bias", true)?;
    let dense = config.count_or(&["num_dense_layers"], 2)?;
    let dense_width = config.size(&["intermediate_size"])?;
    let inter = config.size(&["moe_intermediate_size"])?;

    let geometry = basics.geometry((dense..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.feed_forward.experts", "w1", "w3", "w2");
    let norm = |weights: &mut WeightLoader| Norm::rms(weights, "model.embedding_norm", basics.hidden, basics.eps);
    let build_layer = |weights: &mut WeightLoader, layer: usize| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = match types[layer] {
            "conv" => Box::new(short_conv(&basics, weights, &format!("{prefix}.conv"), width, bias)?),
            _ => Box::new(attention(&basics, weights, &format!("{prefix}.self_attn"), rotary)?),
        };
        let own = format!("{prefix}.feed_forward");
        let ffn = if layer < dense {
            Ffn::dense(Mlp::new(weights, &own, &MlpNames::NUMBERED, (basics.hidden, dense_width), basics.act, false)?)
        } else {
            let bias = if corrected { Some(weights.vector(&format!("{own}.expert_bias"), &[experts])?) } else { None };
            Ffn::moe(basics.moe(weights, layer, &format!("{own}.gate"), Gate { bias, ..gate.clone() })?)
        };
        let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), basics.hidden, basics.eps);
        let [mixer_norm, ffn_norm] = [norm("operator_norm")?, norm("ffn_norm")?];
        Ok(Layer::new(Branch::new(mixer_norm, mixer), Branch::new(ffn_norm, ffn)))
    };
    basics.stack_with(weights, rope, geometry, names, build_layer, norm)
}

fn short_conv(
    basics: &Basics,
    weights: &mut WeightLoader,
    prefix: &str,
    width: usize,
    bias: bool,
) -> Result<ShortConv> {
    let hidden = basics.hidden;
    let parts = RowGroups::consecutive(3 * hidden, [hidden; 3]);
    let parts = parts.each_ref().map(slice::from_ref);
    Ok(ShortConv {
        inputs: weights.linear_parts(&format!("{prefix}.in_proj"), 3 * hidden, hidden, bias, parts)?,
        conv: CausalConv::new(weights, &format!("{prefix}.conv"), basics.hidden, width, bias)?,
        output: weights.linear(&format!("{prefix}.out_proj"), basics.hidden, basics.hidden, bias)?,
    })
}

fn attention(basics: &Basics, weights: &mut WeightLoader, prefix: &str, rotary: Rotary) -> Result<Attention> {
    let plain = basics.attention_as(
        weights,
        prefix,
        "out_proj",
        basics.heads * basics.head_dim,
        AttentionBias::NONE,
        rotary,
    )?;
    let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), basics.head_dim, basics.eps);
    let norm = QkNorm::PerHead(norm("q_layernorm")?, norm("k_layernorm")?);
    Ok(Attention { norm, ..plain })
}
