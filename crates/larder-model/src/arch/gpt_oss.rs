//! gpt-oss: attention with sinks, a sliding window in every other layer, experts with biases and a clamped activation.
//!
//! ```text
//! x += attention(rms(x))                    sinks, biases, RoPE with yarn; sliding window in every other layer
//! x += Σ_k weight · expert(rms(x))          top k of the logits, softmax over the chosen; clamped SwiGLU, biases
//! ```

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx, PerMatrix, RowPick, Score, TensorSlice, Weighting};

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use crate::config::Config;
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Moe, Rope};
use crate::ops::Activation;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics =
        Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(8), head_dim: Some(64), ..Defaults::COMMON })?;
    config.ignore(&["initial_context_length"]); // equals original_max_position_embeddings
    let stretched = config.is_set("rope_scaling") || config.is_set("rope_parameters");
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 150_000.0, basics.context, None)?;
    let rope = if stretched { rope } else { rope.with_yarn(32.0, 4096.0) };
    let masks = masks(config, basics.layers)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", true)?);
    let alpha = config.number_or("swiglu_alpha", 1.702)? as f32;
    let limit = config.positive_or("swiglu_limit", 7.0)? as f32;
    let act = Activation::ClampedSwiglu { alpha, limit };
    let experts = config.size(&["num_local_experts", "num_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok", "experts_per_token"], 4)?;
    let weighting = Weighting::SoftmaxOfChosen;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = config.size(&["intermediate_size"])?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    basics.stack(weights, rope, Geometry { bias: true, ..geometry }, names(), |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let sinks = Some(weights.vector(&format!("{own}.sinks"), &[basics.heads])?);
        let router = weights.linear(&format!("{prefix}.mlp.router"), experts, basics.hidden, true)?;
        let moe = Moe::new(LayerIdx(layer as u16), router, gate.clone(), act);
        basics.layer(weights, &prefix, Attention { mask: masks[layer], sinks, ..attention }, Ffn::moe(moe))
    })
}

/// All experts of a layer in one tensor, gate and up in alternating columns.
fn names() -> ExpertNames {
    let piece = |name: &str, transposed, pick| {
        TensorSlice::stacked(format!("model.layers.{{l}}.mlp.experts.{name}"), transposed, pick)
    };
    ExpertNames {
        matrices: PerMatrix {
            gate: Some(piece("gate_up_proj", true, RowPick::Even)),
            up: piece("gate_up_proj", true, RowPick::Odd),
            down: piece("down_proj", true, RowPick::All),
        },
        bias: Some(PerMatrix {
            gate: Some(piece("gate_up_proj_bias", false, RowPick::Even)),
            up: piece("gate_up_proj_bias", false, RowPick::Odd),
            down: piece("down_proj_bias", false, RowPick::All),
        }),
    }
}

fn masks(config: &mut Config, layers: usize) -> Result<Vec<AttentionMask>> {
    let width = config.size_or(&["sliding_window"], 128)?;
    let types = layer_types(config, layers, &["sliding_attention", "full_attention"])?;
    let slides =
        |layer: usize| types.as_ref().map_or(layer.is_multiple_of(2), |types| types[layer] == "sliding_attention");
    Ok((0..layers)
        .map(|layer| if slides(layer) { AttentionMask::SlidingWindow(width) } else { AttentionMask::Causal })
        .collect())
}
