//! ERNIE-4.5-MoE: neighbouring pairs rotated, a correction bias for the choice, experts from layer to layer.

use larder_core::{ExpertNames, Gate, Renorm, Weighting};

use super::common::{Basics, Bias, Defaults};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Moe, Rope, Rotary, Shared};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let mut b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(4), tied: true, ..Defaults::COMMON })?;
    let bias = c.flag_or("use_bias", false)?;
    b.head_bias = bias;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 5e5, b.context, None)?;
    let rotary = Rotary { interleaved: true, ..rotary };
    let experts = c.size(&["moe_num_experts", "num_experts", "num_local_experts"])?;
    let top_k = c.size(&["moe_k", "num_experts_per_tok"])?;
    let renorm = Renorm::Floor { min: c.number_or("moe_norm_min", 1e-12)? as f32 };
    let weighting = Weighting::Score { renorm, scale: 1.0 };
    let gate = Gate { weighting, ..Gate::softmax(experts, top_k, true) }.checked()?;
    let sparse = sparse_layers(c, b.layers)?;
    c.ignore(&["moe_capacity", "moe_gate", "moe_use_aux_free"]); // of the training code
    let dense_width = c.size(&["intermediate_size"])?;
    let inter = c.size(&["moe_intermediate_size"])?;
    let shared = c.count_or(&["moe_num_shared_experts"], 2)?;

    let geometry = b.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let attention = b.attention(w, &format!("{prefix}.self_attn"), Bias::all(bias), rotary)?;
        let mlp = format!("{prefix}.mlp");
        if !sparse.contains(&l) {
            let dense = b.mlp(w, &mlp, dense_width, bias)?;
            return b.layer(w, &prefix, attention, Ffn::Dense(dense));
        }
        let correction = w.vector(&format!("{mlp}.moe_statics.e_score_correction_bias"), &[1, experts])?;
        let gate = Gate { bias: Some(correction), ..gate.clone() };
        let moe = b.moe(w, l, &format!("{mlp}.gate"), gate)?;
        let shared = match shared {
            0 => None,
            n => Some(Shared { mlp: b.mlp(w, &format!("{mlp}.shared_experts"), inter * n, bias)?, gate: None }),
        };
        b.layer(w, &prefix, attention, Ffn::moe(Moe { shared, ..moe }))
    })
}

fn sparse_layers(c: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let start = c.count_or(&["moe_layer_start_index"], 1)?;
    let end = c.number_or("moe_layer_end_index", -1.0)?;
    let end = if end < 0.0 { layers.saturating_sub(1) } else { end as usize };
    let interval = c.size_or(&["moe_layer_interval"], 1)?;
    Ok((start..layers.min(end.saturating_add(1))).filter(|l| (l + 1).is_multiple_of(interval)).collect())
}
