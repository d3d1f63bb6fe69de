//! Granite-MoE: constant factors on embedding, attention, residual and logits; gate and up of all experts fused.

use larder_core::{ExpertNames, Gate, RowPick, Score, TensorSlice, Weighting};

use super::common::{Basics, Bias, Defaults};
use crate::config::Config;
use crate::decoder::{Factors, Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { eps: 1e-6, ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, None)?;
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let scale = c.number_or("attention_multiplier", 1.0)?;
    let factors = Factors {
        embedding: c.number_or("embedding_multiplier", 1.0)?,
        residual: c.number_or("residual_multiplier", 1.0)?,
        logits: 1.0 / c.positive_or("logits_scaling", 1.0)?,
    };
    let experts = c.size(&["num_local_experts", "num_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 2)?;
    let weighting = Weighting::SoftmaxOfChosen;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = c.size(&["intermediate_size"])?;

    let geometry = b.geometry((0..b.layers).collect(), experts, top_k, inter)?;
    let piece = |name: &str, pick| {
        TensorSlice::stacked(format!("model.layers.{{l}}.block_sparse_moe.{name}.weight"), false, pick)
    };
    let names = ExpertNames {
        gate: piece("input_linear", RowPick::FirstHalf),
        up: piece("input_linear", RowPick::SecondHalf),
        down: piece("output_linear", RowPick::All),
        bias: None,
    };
    let stack = b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let attention = b.attention(w, &format!("{prefix}.self_attn"), bias, rotary)?;
        let moe = b.moe(w, l, &format!("{prefix}.block_sparse_moe.router.layer"), gate.clone())?;
        b.layer(w, &prefix, Attention { scale, ..attention }, Ffn::moe(moe))
    })?;
    Ok(Stack { factors, ..stack })
}
