//! LFM2-MoE: short convolutions in most layers, attention in a few, sigmoid-gated experts after the dense layers.

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{Basics, Bias, Defaults, layer_types};
use crate::config::{Config, bad};
use crate::decoder::{Ffn, Layer, Stack};
use crate::error::Result;
use crate::nn::{Activation, Attention, CausalConv, HeadNorm, Mixer, Mlp, MlpNames, Norm, Rope, Rotary, ShortConv};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let mut b = Basics::parse(c, "norm_eps", Defaults { kv_heads: Some(8), tied: true, ..Defaults::COMMON })?;
    if b.act != Activation::Silu {
        return Err(bad("lfm2_moe is defined for hidden_act silu only"));
    }
    b.tied = c.flag_or("tie_embedding", b.tied)?; // an older name, which goes first
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e6, b.context, None)?;
    let types = layer_types(c, b.layers, &["conv", "full_attention"])?.ok_or_else(|| bad("has no layer_types"))?;
    let (width, bias) = (c.size_or(&["conv_L_cache"], 3)?, c.flag_or("conv_bias", false)?);
    let experts = c.size(&["num_experts", "num_local_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 4)?;
    let renorm = if c.flag_or("norm_topk_prob", true)? { Renorm::Sum { plus: 1e-6 } } else { Renorm::No };
    let weighting = Weighting::Score { renorm, scale: c.number_or("routed_scaling_factor", 1.0)? as f32 };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let corrected = c.flag_or("use_expert_bias", true)?;
    let dense = c.count_or(&["num_dense_layers"], 2)?;
    let dense_width = c.size(&["intermediate_size"])?;
    let inter = c.size(&["moe_intermediate_size"])?;

    let geometry = b.geometry((dense..b.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.feed_forward.experts", "w1", "w3", "w2");
    let norm = |w: &mut Weights| Norm::rms(w, "model.embedding_norm", b.hidden, b.eps);
    let layer = |w: &mut Weights, l: usize| {
        let prefix = format!("model.layers.{l}");
        let mixer: Box<dyn Mixer> = match types[l] {
            "conv" => Box::new(short_conv(&b, w, &format!("{prefix}.conv"), width, bias)?),
            _ => Box::new(attention(&b, w, &format!("{prefix}.self_attn"), rotary)?),
        };
        let own = format!("{prefix}.feed_forward");
        let ffn = match l < dense {
            true => Ffn::Dense(Mlp::new(w, &own, &MlpNames::NUMBERED, (b.hidden, dense_width), b.act, false)?),
            false => {
                let bias = match corrected {
                    true => Some(w.vector(&format!("{own}.expert_bias"), &[experts])?),
                    false => None,
                };
                Ffn::moe(b.moe(w, l, &format!("{own}.gate"), Gate { bias, ..gate.clone() })?)
            }
        };
        Ok(Layer {
            mixer_norm: Norm::rms(w, &format!("{prefix}.operator_norm"), b.hidden, b.eps)?,
            mixer,
            ffn_norm: Norm::rms(w, &format!("{prefix}.ffn_norm"), b.hidden, b.eps)?,
            ffn,
        })
    };
    b.stack_with(w, rope, geometry, names, layer, norm)
}

fn short_conv(b: &Basics, w: &mut Weights, prefix: &str, width: usize, bias: bool) -> Result<ShortConv> {
    Ok(ShortConv {
        input: w.linear(&format!("{prefix}.in_proj"), 3 * b.hidden, b.hidden, bias)?,
        conv: CausalConv::new(w, &format!("{prefix}.conv"), b.hidden, width, bias)?,
        output: w.linear(&format!("{prefix}.out_proj"), b.hidden, b.hidden, bias)?,
    })
}

fn attention(b: &Basics, w: &mut Weights, prefix: &str, rotary: Rotary) -> Result<Attention> {
    let plain = b.attention_as(w, prefix, "out_proj", b.heads * b.head_dim, Bias::NO, rotary)?;
    let mut norm = |name: &str| Norm::rms(w, &format!("{prefix}.{name}"), b.head_dim, b.eps);
    let norm = HeadNorm::PerHead(norm("q_layernorm")?, norm("k_layernorm")?);
    Ok(Attention { norm, ..plain })
}
