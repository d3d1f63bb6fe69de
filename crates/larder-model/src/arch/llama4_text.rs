//! Llama 4 (text): chunked attention, layers without positions, and experts whose input is scaled by the gate.

use larder_core::{ExpertNames, Gate, RowPick, Score, TensorSlice, Weighting};

use super::common::{Basics, Bias, Defaults, layer_types};
use crate::config::{Config, bad};
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, HeadNorm, Moe, Rope, Rotary, Shared, Temperature, Visible};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(8), head_dim: Some(128), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 5e5, b.context, None)?;
    let rotary = Rotary { interleaved: true, ..rotary };
    let rotated = rotated_layers(c, b.layers)?;
    let visible = visible(c, &rotated)?;
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let normed = c.flag_or("use_qk_norm", true)?;
    let temperature = temperature(c)?;
    let experts = c.size(&["num_local_experts", "num_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 1)?;
    let weighting = Weighting::SigmoidOfChosen;
    let gate = Gate { score: Score::Raw, weighting, scales_input: true, ..Gate::softmax(experts, top_k, false) };
    let gate = gate.checked()?;
    let sparse = sparse_layers(c, b.layers)?;
    let inter = c.size(&["intermediate_size"])?;
    let dense_width = c.size_or(&["intermediate_size_mlp"], inter)?;
    c.ignore(&["router_jitter_noise"]); // used in training only

    let geometry = b.geometry(sparse.clone(), experts, top_k, inter)?;
    b.stack(w, rope, geometry, names(), |w, l| {
        let prefix = format!("model.layers.{l}");
        let plain = b.attention(w, &format!("{prefix}.self_attn"), bias, rotary)?;
        let attention = Attention {
            visible: visible[l],
            rotary: rotated[l].then_some(rotary),
            norm: if normed && rotated[l] { HeadNorm::AfterRope { eps: b.eps } } else { HeadNorm::No },
            temperature: temperature.filter(|_| !rotated[l]),
            ..plain
        };
        let own = format!("{prefix}.feed_forward");
        let ffn = match sparse.contains(&l) {
            true => {
                let moe = b.moe(w, l, &format!("{own}.router"), gate.clone())?;
                let mlp = b.mlp(w, &format!("{own}.shared_expert"), inter, false)?;
                Ffn::moe(Moe { shared: Some(Shared { mlp, gate: None }), ..moe })
            }
            false => Ffn::Dense(b.mlp(w, &own, dense_width, false)?),
        };
        b.layer(w, &prefix, attention, ffn)
    })
}

/// All experts of a layer in one tensor, stored as `[in, out]`.
fn names() -> ExpertNames {
    let piece =
        |name: &str, pick| TensorSlice::stacked(format!("model.layers.{{l}}.feed_forward.experts.{name}"), true, pick);
    ExpertNames {
        gate: piece("gate_up_proj", RowPick::FirstHalf),
        up: piece("gate_up_proj", RowPick::SecondHalf),
        down: piece("down_proj", RowPick::All),
        bias: None,
    }
}

/// The layers whose queries and keys are rotated; the config's list holds a 1 for each.
fn rotated_layers(c: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let every = c.size_or(&["no_rope_layer_interval"], 4)?;
    match c.opt_counts("no_rope_layers")?.filter(|list| !list.is_empty()) {
        None => Ok((0..layers).map(|l| !(l + 1).is_multiple_of(every)).collect()),
        Some(list) if list.len() == layers => Ok(list.into_iter().map(|v| v != 0).collect()),
        Some(list) => Err(bad(format!("no_rope_layers names {} layers of {layers}", list.len()))),
    }
}

fn visible(c: &mut Config, rotated: &[bool]) -> Result<Vec<Visible>> {
    let width = c.size_or(&["attention_chunk_size"], 8192)?;
    let types = layer_types(c, rotated.len(), &["chunked_attention", "full_attention"])?;
    let chunked = |l: usize| types.as_ref().map_or(rotated[l], |types| types[l] == "chunked_attention");
    Ok((0..rotated.len()).map(|l| if chunked(l) { Visible::Chunk(width) } else { Visible::All }).collect())
}

fn temperature(c: &mut Config) -> Result<Option<Temperature>> {
    let (floor, scale) = (c.positive_or("floor_scale", 8192.0)?, c.number_or("attn_scale", 0.1)?);
    Ok(c.flag_or("attn_temperature_tuning", true)?.then_some(Temperature { floor, scale }))
}

fn sparse_layers(c: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let step = c.size_or(&["interleave_moe_layer_step"], 1)?;
    let listed = c.opt_counts("moe_layers")?;
    match listed {
        None => Ok((step - 1..layers).step_by(step).collect()),
        Some(mut list) => {
            list.sort_unstable();
            list.dedup();
            match list.last() {
                Some(last) if *last >= layers => Err(bad(format!("moe_layers names layer {last} of {layers}"))),
                _ => Ok(list),
            }
        }
    }
}
