//! AFMoE (Trinity): attention whose output is gated, norms before and after every part, layers with sliding windows
//! that rotate and others without positions.
//!
//! ```text
//! x  = embedding · √hidden                  with mup_enabled
//! x += rms(attention(rms(x)))               QK norm per head, times the sigmoid of a gate per value before the output;
//!                                           sliding window and RoPE, or neither
//! x += rms(mlp(rms(x)))                     first layers
//! x += rms(Σ_k weight · expert(y) + shared(y))
//!                                           the others: y = rms(x); top k of sigmoid + bias, weights from the sigmoid,
//!                                           renormalised and scaled
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Mixer, Moe, Norm, OutputGate, Rope, SharedExpert};
use crate::ops::GateFunction;
use crate::stack::{Branch, Factors, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { head_dim: Some(128), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let windows = windows(config, basics.layers)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size_or(&["num_experts", "num_local_experts"], 64)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 6)?;
    let scale = config.number_or("route_scale", 1.0)? as f32;
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 1e-20 }, scale };
    let gate = Gate { score: Score::Sigmoid, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let dense_layers = config.count_or(&["num_dense_layers"], 1)?;
    let dense_width = config.size_or(&["intermediate_size"], 6144)?;
    let inter = config.size_or(&["moe_intermediate_size"], 1408)?;
    let shared = config.count_or(&["num_shared_experts"], 2)?;
    let mup = config.flag_or("mup_enabled", false)?;
    config.ignore(&["load_balance_coeff", "use_grouped_mm"]); // of training; another way to the same matmuls

    let geometry = basics.geometry((dense_layers..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let stack = basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let product =
            weights.linear(&format!("{own}.gate_proj"), basics.heads * basics.head_dim, basics.hidden, false)?;
        let attention = Attention {
            norm: basics.qk_norm(weights, &own)?,
            rotary: windows[layer].map(|_| rotary),
            mask: windows[layer].unwrap_or(AttentionMask::Causal),
            output_gate: OutputGate::Product(product, GateFunction::Sigmoid),
            ..attention
        };
        let ffn = if layer < dense_layers {
            Ffn::dense(basics.mlp(weights, &mlp, dense_width, false)?)
        } else {
            let bias = weights.vector(&format!("{mlp}.expert_bias"), &[experts])?;
            let gate = Gate { bias: Some(bias), ..gate.clone() };
            let moe = basics.moe(weights, layer, &format!("{mlp}.router.gate"), gate)?;
            let shared = match shared {
                0 => None,
                n => Some(basics.mlp(weights, &format!("{mlp}.shared_experts"), n * inter, false)?),
            };
            Ffn::moe(Moe { shared: shared.map(|mlp| SharedExpert { mlp, gate: None }), ..moe })
        };
        let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), basics.hidden, basics.eps);
        let [mixer_norm, ffn_norm] = [norm("input_layernorm")?, norm("pre_mlp_layernorm")?];
        let [mixer_after, ffn_after] = [norm("post_attention_layernorm")?, norm("post_mlp_layernorm")?].map(Some);
        let mixer: Box<dyn Mixer> = Box::new(attention);
        let mixer = Branch { after: mixer_after, ..Branch::new(mixer_norm, mixer) };
        Ok(Layer::new(mixer, Branch { after: ffn_after, ..Branch::new(ffn_norm, ffn) }))
    })?;
    let embedding = if mup { (basics.hidden as f64).sqrt() } else { 1.0 };
    Ok(Stack { factors: Factors { embedding, ..Factors::default() }, ..stack })
}

/// The sliding window of each layer, or none for full attention: by `layer_types`, else full attention in every
/// `global_attn_every_n_layers`-th.
fn windows(config: &mut Config, layers: usize) -> Result<Vec<Option<AttentionMask>>> {
    let every = config.size_or(&["global_attn_every_n_layers"], 4)?;
    let types = layer_types(config, layers, &["sliding_attention", "full_attention"])?;
    let default = if config.contains("sliding_window") { None } else { Some(1024) };
    let window = config.opt_size(&["sliding_window"])?.or(default).map(AttentionMask::SlidingWindow);
    let slides = |layer: usize| {
        types.as_ref().map_or(!(layer + 1).is_multiple_of(every), |types| types[layer] == "sliding_attention")
    };
    let slides: Vec<_> = (0..layers).map(slides).collect();
    if window.is_none() && slides.contains(&true) {
        return Err(config_error("sliding_window is null, but there are layers with sliding_attention"));
    }
    Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
}
