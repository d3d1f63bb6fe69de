//! Llama 4 (text): chunked attention, layers without RoPE, and experts whose input is scaled by the gate.
//!
//! ```text
//! x += attention(rms(x))                    RoPE layers: adjacent pairs, chunked mask, QK norm after the rotation;
//!                                           every fourth layer: no RoPE, causal mask, queries scaled by position
//! x += Σ_k expert(weight · y) + shared(y)   y = rms(x); top k of the logits, weight = sigmoid of the chosen
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate, PerMatrix, RowPick, Score, TensorSlice, Weighting};

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, AttentionTemperature, Moe, QkNorm, Rope, SharedExpert};
use crate::ops::Rotary;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics =
        Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 5e5, basics.context, None)?;
    let rotary = Rotary { interleaved: true, ..rotary };
    let rotated = rotated_layers(config, basics.layers)?;
    let masks = masks(config, &rotated)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let normed = config.flag_or("use_qk_norm", true)?;
    let temperature = temperature(config)?;
    let experts = config.size(&["num_local_experts", "num_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok"], 1)?;
    let weighting = Weighting::SigmoidOfChosen;
    let gate = Gate { score: Score::Raw, weighting, scales_input: true, ..Gate::softmax(experts, top_k, false) };
    let gate = gate.checked()?;
    let sparse = sparse_layers(config, basics.layers)?;
    let inter = config.size(&["intermediate_size"])?;
    let dense_width = config.size_or(&["intermediate_size_mlp"], inter)?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    basics.stack(weights, rope, geometry, names(), |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let plain = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
        let attention = Attention {
            mask: masks[layer],
            rotary: rotated[layer].then_some(rotary),
            norm: if normed && rotated[layer] { QkNorm::AfterRope { eps: basics.eps } } else { QkNorm::None },
            temperature: temperature.filter(|_| !rotated[layer]),
            ..plain
        };
        let own = format!("{prefix}.feed_forward");
        let ffn = if sparse.contains(&layer) {
            let moe = basics.moe(weights, layer, &format!("{own}.router"), gate.clone())?;
            let mlp = basics.mlp(weights, &format!("{own}.shared_expert"), inter, false)?;
            Ffn::moe(Moe { shared: Some(SharedExpert { mlp, gate: None }), ..moe })
        } else {
            Ffn::dense(basics.mlp(weights, &own, dense_width, false)?)
        };
        basics.layer(weights, &prefix, attention, ffn)
    })
}

/// All experts of a layer in one tensor, stored as `[in, out]`.
fn names() -> ExpertNames {
    let piece =
        |name: &str, pick| TensorSlice::stacked(format!("model.layers.{{l}}.feed_forward.experts.{name}"), true, pick);
    ExpertNames {
        matrices: PerMatrix {
            gate: Some(piece("gate_up_proj", RowPick::FirstHalf)),
            up: piece("gate_up_proj", RowPick::SecondHalf),
            down: piece("down_proj", RowPick::All),
        },
        bias: None,
    }
}

/// The layers with RoPE; the config's list has a 1 for each of them.
fn rotated_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let every = config.size_or(&["no_rope_layer_interval"], 4)?;
    match config.opt_counts("no_rope_layers")?.filter(|list| !list.is_empty()) {
        None => Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect()),
        Some(list) if list.len() == layers => Ok(list.into_iter().map(|v| v != 0).collect()),
        Some(list) => Err(config_error(format!("no_rope_layers has {} entries for {layers} layers", list.len()))),
    }
}

fn masks(config: &mut Config, rotated: &[bool]) -> Result<Vec<AttentionMask>> {
    let width = config.size_or(&["attention_chunk_size"], 8192)?;
    let types = layer_types(config, rotated.len(), &["chunked_attention", "full_attention"])?;
    let chunked = |layer: usize| types.as_ref().map_or(rotated[layer], |types| types[layer] == "chunked_attention");
    Ok((0..rotated.len())
        .map(|layer| if chunked(layer) { AttentionMask::Chunked(width) } else { AttentionMask::Causal })
        .collect())
}

fn temperature(config: &mut Config) -> Result<Option<AttentionTemperature>> {
    let (floor, scale) = (config.positive_or("floor_scale", 8192.0)?, config.number_or("attn_scale", 0.1)?);
    Ok(config.flag_or("attn_temperature_tuning", true)?.then_some(AttentionTemperature { floor, scale, first: 1 }))
}

fn sparse_layers(config: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let step = config.size_or(&["interleave_moe_layer_step"], 1)?;
    let listed = config.opt_counts("moe_layers")?;
    match listed {
        None => Ok((step - 1..layers).step_by(step).collect()),
        Some(mut list) => {
            list.sort_unstable();
            list.dedup();
            match list.last() {
                Some(last) if *last >= layers => {
                    Err(config_error(format!("moe_layers names layer {last}; the model has {layers} layers")))
                }
                _ => Ok(list),
            }
        }
    }
}
