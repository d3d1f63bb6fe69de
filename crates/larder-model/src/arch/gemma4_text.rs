//! Gemma 4 with experts: an MLP beside them, norms before and after every part, and two kinds of attention.
//!
//! ```text
//! x  = embedding · √hidden
//! x += rms(attention(rms(x)))               QK norm per head, values normalised too; sliding windows, or wider heads
//!                                           whose values are the keys' matmul
//! y  = rms(mlp(rms(x))) + rms(Σ_k weight · expert(rms(x)))
//!                                           softmax of a router on the normalised x, top k, renormalised, times a
//!                                           factor per expert
//! x  = (x + rms(y)) · factor
//! logits = cap · tanh(head(rms(x)) / cap)
//! ```

use larder_core::{ExpertNames, Gate};
use serde_json::json;

use super::common::{AttentionBias, Basics, Defaults, layer_types, per_layer_config};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, DenseBeside, Mixer, Norm, Rope, RopeType};
use crate::ops::{Activation, Rotary};
use crate::stack::{Branch, Factors, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

/// Types of layers, in the order of the ropes.
const TYPES: [&str; 2] = ["sliding_attention", "full_attention"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(4), head_dim: Some(256), tied: true };
    let mut basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    basics.act = Activation::named(config.opt_text("hidden_activation")?.unwrap_or("gelu_pytorch_tanh"))?;
    check_fixed(config)?;
    let full = full_layers(config, basics.layers)?;
    let layers = shapes(config, &basics, &full)?;
    let ropes = ropes(config, &layers, &full, basics.context)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let shares_product = config.flag_or("attention_k_eq_v", false)?;
    let window = AttentionMask::SlidingWindow(config.size_or(&["sliding_window"], 512)?);
    let softcap = config.opt_number("final_logit_softcapping")?.filter(|cap| *cap != 0.0);
    let gate = Gate::softmax(config.size(&["num_experts"])?, config.size(&["top_k_experts"])?, true).checked()?;
    let inter = config.size(&["moe_intermediate_size"])?;
    let width = config.size(&["intermediate_size"])?;

    let geometry = basics.geometry((0..basics.layers).collect(), gate.experts, gate.top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.experts", "gate_proj", "up_proj", "down_proj");
    let (first, second) = (ropes[0].0.clone(), ropes[1].0.clone());
    let stack = basics.stack(weights, first, geometry, names, |weights, layer| {
        let (prefix, is_full) = (format!("model.layers.{layer}"), full[layer]);
        let own = format!("{prefix}.self_attn");
        let rotary = ropes[usize::from(is_full)].1;
        let mask = if is_full { AttentionMask::Causal } else { window };
        let attention = attention(weights, &own, &layers[layer], bias, rotary, is_full && shares_product)?;
        let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), basics.hidden, basics.eps);
        let [mixer_after, ffn_after] =
            [norm("post_attention_layernorm")?, norm("post_feedforward_layernorm")?].map(Some);
        let [mixer_norm, ffn_norm] = [norm("input_layernorm")?, norm("pre_feedforward_layernorm_2")?];
        let ffn = ffn(&basics, weights, layer, &gate, width)?;
        let scale = weights.vector(&format!("{prefix}.layer_scalar"), &[1])?.first().map_or(1.0, |s| *s as f64);
        let mixer = Branch::new(mixer_norm, Box::new(Attention { mask, ..attention }) as Box<dyn Mixer>);
        let mixer = Branch { after: mixer_after, ..mixer };
        let ffn = Branch { after: ffn_after, ..Branch::new(ffn_norm, ffn) };
        Ok(Layer { scale, ..Layer::new(mixer, ffn) })
    })?;
    let factors = Factors { embedding: (basics.hidden as f64).sqrt(), softcap, ..Factors::default() };
    Ok(Stack { factors, ropes: vec![stack.ropes[0].clone(), second], ..stack })
}

/// Attention in the shape of a layer; with `shares_product` the matmul of the keys yields the values too.
fn attention(
    weights: &mut WeightLoader,
    prefix: &str,
    shape: &Basics,
    bias: AttentionBias,
    rotary: Rotary,
    shares_product: bool,
) -> Result<Attention> {
    let attention = if shares_product {
        shape.attention_of_keys(weights, prefix, "o_proj", shape.heads * shape.head_dim, bias, rotary)?
    } else {
        shape.attention(weights, prefix, bias, rotary)?
    };
    let norm = shape.qk_norm(weights, prefix)?;
    Ok(Attention { norm, value_norm: Some(shape.eps), scale: 1.0, ..attention })
}

/// Router, experts, and the MLP beside them.
fn ffn(basics: &Basics, weights: &mut WeightLoader, layer: usize, gate: &Gate, width: usize) -> Result<Ffn> {
    let prefix = format!("model.layers.{layer}");
    let scales = weights.vector(&format!("{prefix}.router.per_expert_scale"), &[gate.experts])?;
    let gate = Gate { expert_scales: Some(scales), ..gate.clone() };
    let mut moe = basics.moe(weights, layer, &format!("{prefix}.router.proj"), gate)?;
    let mut weight = weights.vector(&format!("{prefix}.router.scale"), &[basics.hidden])?;
    weight.iter_mut().for_each(|w| *w *= (basics.hidden as f64).powf(-0.5) as f32);
    let mlp = basics.mlp(weights, &format!("{prefix}.mlp"), width, false)?;
    let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), basics.hidden, basics.eps);
    moe.beside = Some(DenseBeside {
        router_norm: Norm::Rms { weight: weight.into(), eps: basics.eps },
        norm: norm("pre_feedforward_layernorm")?,
        mlp,
        after: norm("post_feedforward_layernorm_1")?,
        after_experts: norm("post_feedforward_layernorm_2")?,
    });
    Ok(Ffn::moe(moe))
}

/// For each layer, whether it has full attention: by `layer_types`, else every sixth. The last one always has.
fn full_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let types = layer_types(config, layers, &TYPES)?;
    let full = |layer: usize| match &types {
        Some(types) => types[layer] == TYPES[1],
        None => (layer + 1).is_multiple_of(6),
    };
    Ok((0..layers).map(|layer| layer + 1 == layers || full(layer)).collect())
}

/// The heads of each layer: those of layers with full attention by keys of their own, or each by `per_layer_config`.
fn shapes(config: &mut Config, basics: &Basics, full: &[bool]) -> Result<Vec<Basics>> {
    let global_dim = config.size_or(&["global_head_dim"], 512)?;
    let shared = config.flag_or("attention_k_eq_v", false)?;
    let global_kv = config.opt_size(&["num_global_key_value_heads"])?.filter(|_| shared).unwrap_or(basics.kv_heads);
    let given = config.is_set("per_layer_config");
    let of_layer = |full: &bool| {
        if *full && !given {
            Basics { head_dim: global_dim, kv_heads: global_kv, ..basics.clone() }
        } else {
            basics.clone()
        }
    };
    let mut shapes: Vec<_> = full.iter().map(of_layer).collect();
    per_layer_config(config, full.len(), |layer, own| {
        shapes[layer].head_dim = own.size_or(&["head_dim"], basics.head_dim)?;
        shapes[layer].kv_heads = own.size_or(&["num_key_value_heads"], basics.kv_heads)?;
        Ok(())
    })?;
    match shapes.iter().position(|shape| !shape.heads.is_multiple_of(shape.kv_heads)) {
        Some(layer) => Err(config_error(format!(
            "num_attention_heads {} is not a multiple of the {} key and value heads of layer {layer}",
            basics.heads, shapes[layer].kv_heads
        ))),
        None => Ok(shapes),
    }
}

/// The ropes of both types of layers.
fn ropes(config: &mut Config, layers: &[Basics], full: &[bool], context: usize) -> Result<Vec<(Rope, Rotary)>> {
    let width = |kind: bool| {
        let mut widths = layers.iter().zip(full).filter(|(_, full)| **full == kind).map(|(layer, _)| layer.head_dim);
        let first = widths.next().unwrap_or(layers[0].head_dim);
        if widths.all(|width| width == first) {
            Ok(first)
        } else {
            Err(config_error("layers of the same type have heads of different widths, which is not supported"))
        }
    };
    let rope = |name, prefix, head_dim| RopeType {
        name,
        prefix,
        older: None,
        head_dim,
        theta: 1e4,
        partial: 1.0,
        amplitude: None,
    };
    let types = [
        rope(TYPES[0], "rope_parameters.sliding_attention.", width(false)?),
        rope(TYPES[1], "rope_parameters.full_attention.", width(true)?),
    ];
    let ropes = match config.is_set("rope_parameters") {
        true => Rope::parse_types(config, &types, context)?,
        // Those of the published models, which the reference has as its defaults.
        false => {
            let global = json!({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6});
            let published = json!({"rope_parameters": {"full_attention": global}});
            Rope::parse_types(&mut Config::new(&published)?, &types, context)?
        }
    };
    if ropes.iter().zip(&types).all(|((_, rotary), of)| rotary.dim == of.head_dim) {
        Ok(ropes)
    } else {
        Err(config_error("partial_rotary_factor of gemma4 needs the rope_type proportional"))
    }
}

/// Keys that turn on parts of the small variants without experts.
fn check_fixed(config: &mut Config) -> Result<()> {
    if !config.flag_or("enable_moe_block", false)? {
        return Err(config_error("enable_moe_block must be true: models without experts are not supported"));
    }
    if config.count_or(&["hidden_size_per_layer_input"], 256)? != 0 {
        return Err(config_error(
            "hidden_size_per_layer_input must be 0 for gemma4; embeddings per layer are not supported",
        ));
    }
    config.only("num_kv_shared_layers", 0);
    config.only("use_bidirectional_attention", "vision");
    config.ignore(&["use_double_wide_mlp", "vocab_size_per_layer_input"]); // of layers that share keys, and of the above
    Ok(())
}
