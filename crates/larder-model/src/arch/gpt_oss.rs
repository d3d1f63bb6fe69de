//! gpt-oss: attention with sinks, sliding in every other layer, and experts with biases and a clamped activation.

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx, RowPick, Score, TensorSlice, Weighting};

use super::common::{Basics, Bias, Defaults, layer_types};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Activation, Attention, Moe, Rope, Visible};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(8), head_dim: Some(64), ..Defaults::COMMON })?;
    c.ignore(&["initial_context_length"]); // the same number as in the rope's parameters
    let stretched = c.has("rope_scaling") || c.has("rope_parameters");
    let (rope, rotary) = Rope::parse(c, b.head_dim, 150_000.0, b.context, None)?;
    let rope = if stretched { rope } else { rope.with_yarn(32.0, 4096.0) };
    let visible = visible(c, b.layers)?;
    let bias = Bias::all(c.flag_or("attention_bias", true)?);
    let alpha = c.number_or("swiglu_alpha", 1.702)? as f32;
    let limit = c.positive_or("swiglu_limit", 7.0)? as f32;
    let act = Activation::ClampedSwiglu { alpha, limit };
    let experts = c.size(&["num_local_experts", "num_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok", "experts_per_token"], 4)?;
    let weighting = Weighting::SoftmaxOfChosen;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = c.size(&["intermediate_size"])?;

    let geometry = b.geometry((0..b.layers).collect(), experts, top_k, inter)?;
    b.stack(w, rope, Geometry { bias: true, ..geometry }, names(), |w, l| {
        let prefix = format!("model.layers.{l}");
        let own = format!("{prefix}.self_attn");
        let attention = b.attention(w, &own, bias, rotary)?;
        let sinks = Some(w.vector(&format!("{own}.sinks"), &[b.heads])?);
        let router = w.linear(&format!("{prefix}.mlp.router"), experts, b.hidden, true)?;
        let moe = Moe { layer: LayerIdx(l as u16), router, gate: gate.clone(), act, shared: None };
        b.layer(w, &prefix, Attention { visible: visible[l], sinks, ..attention }, Ffn::moe(moe))
    })
}

/// All experts of a layer in one tensor, gate and up in alternating columns.
fn names() -> ExpertNames {
    let piece = |name: &str, transposed, pick| {
        TensorSlice::stacked(format!("model.layers.{{l}}.mlp.experts.{name}"), transposed, pick)
    };
    ExpertNames {
        gate: piece("gate_up_proj", true, RowPick::Even),
        up: piece("gate_up_proj", true, RowPick::Odd),
        down: piece("down_proj", true, RowPick::All),
        bias: Some([
            piece("gate_up_proj_bias", false, RowPick::Even),
            piece("gate_up_proj_bias", false, RowPick::Odd),
            piece("down_proj_bias", false, RowPick::All),
        ]),
    }
}

fn visible(c: &mut Config, layers: usize) -> Result<Vec<Visible>> {
    let width = c.size_or(&["sliding_window"], 128)?;
    let types = layer_types(c, layers, &["sliding_attention", "full_attention"])?;
    let slides = |l: usize| types.as_ref().map_or(l.is_multiple_of(2), |types| types[l] == "sliding_attention");
    Ok((0..layers).map(|l| if slides(l) { Visible::Window(width) } else { Visible::All }).collect())
}
