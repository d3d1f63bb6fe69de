//! Qwen3-Next: linear attention in most layers, gated softmax attention in the others, a gated shared expert.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Bias, Defaults, layer_types, sparse_layers};
use super::qwen2_moe::with_shared;
use crate::config::{Config, bad};
use crate::decoder::{Ffn, Layer, Stack};
use crate::error::Result;
use crate::nn::{Activation, Attention, DeltaShape, GatedDelta, HeadNorm, Mixer, Norm, Rope, Rotary};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(
        c,
        "rms_norm_eps",
        Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(256), ..Defaults::COMMON },
    )?;
    if b.act != Activation::Silu {
        return Err(bad("qwen3_next is defined for hidden_act silu only"));
    }
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, Some(0.25))?;
    let linear = linear_layers(c, b.layers)?;
    let delta = delta_shape(c)?;
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let experts = c.size(&["num_experts", "num_local_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 10)?;
    let gate = Gate::softmax(experts, top_k, c.flag_or("norm_topk_prob", true)?).checked()?;
    let sparse = sparse_layers(c, b.layers)?;
    let dense_width = c.size_or(&["intermediate_size"], 5632)?;
    let inter = c.size(&["moe_intermediate_size"])?;
    let shared_width = c.size(&["shared_expert_intermediate_size"])?;

    let geometry = b.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let norm = |w: &mut Weights| Norm::rms_plus_one(w, "model.norm", b.hidden, b.eps);
    let layer = |w: &mut Weights, l: usize| {
        let prefix = format!("model.layers.{l}");
        let mixer: Box<dyn Mixer> = match linear[l] {
            true => Box::new(GatedDelta::new(w, &format!("{prefix}.linear_attn"), b.hidden, delta, b.eps)?),
            false => Box::new(attention(&b, w, &format!("{prefix}.self_attn"), bias, rotary)?),
        };
        let ffn = match sparse.contains(&l) {
            true => Ffn::moe(with_shared(&b, w, l, gate.clone(), shared_width)?),
            false => Ffn::Dense(b.mlp(w, &format!("{prefix}.mlp"), dense_width, false)?),
        };
        Ok(Layer {
            mixer_norm: Norm::rms_plus_one(w, &format!("{prefix}.input_layernorm"), b.hidden, b.eps)?,
            mixer,
            ffn_norm: Norm::rms_plus_one(w, &format!("{prefix}.post_attention_layernorm"), b.hidden, b.eps)?,
            ffn,
        })
    };
    b.stack_with(w, rope, geometry, names, layer, norm)
}

/// Softmax attention whose query product also yields a gate for its output.
fn attention(b: &Basics, w: &mut Weights, prefix: &str, bias: Bias, rotary: Rotary) -> Result<Attention> {
    let plain = b.attention_as(w, prefix, "o_proj", 2 * b.heads * b.head_dim, bias, rotary)?;
    let mut norm = |name: &str| Norm::rms_plus_one(w, &format!("{prefix}.{name}"), b.head_dim, b.eps);
    let norm = HeadNorm::PerHead(norm("q_norm")?, norm("k_norm")?);
    Ok(Attention { norm, output_gate: true, ..plain })
}

fn delta_shape(c: &mut Config) -> Result<DeltaShape> {
    let shape = DeltaShape {
        k_heads: c.size(&["linear_num_key_heads"])?,
        v_heads: c.size(&["linear_num_value_heads"])?,
        k_dim: c.size(&["linear_key_head_dim"])?,
        v_dim: c.size(&["linear_value_head_dim"])?,
        conv: c.size_or(&["linear_conv_kernel_dim"], 4)?,
    };
    if !shape.v_heads.is_multiple_of(shape.k_heads) {
        let DeltaShape { k_heads, v_heads, .. } = shape;
        return Err(bad(format!("{v_heads} linear value heads cannot share {k_heads} key heads")));
    }
    Ok(shape)
}

fn linear_layers(c: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let every = c.size_or(&["full_attention_interval"], 4)?;
    let types = layer_types(c, layers, &["linear_attention", "full_attention"])?;
    Ok((0..layers)
        .map(|l| match &types {
            Some(types) => types[l] == "linear_attention",
            None => !(l + 1).is_multiple_of(every),
        })
        .collect())
}
