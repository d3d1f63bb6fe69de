//! Qwen3-MoE: queries and keys normalised per head, no shared expert.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Bias, Defaults, sparse_layers, window};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { eps: 1e-6, kv_heads: Some(4), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, None)?;
    let slides = c.flag_or("use_sliding_window", false)?;
    c.ignore(&["sliding_window", "max_window_layers"]); // the first counts only with the flag, the second never
    let visible = window(if slides { Some(c.size_or(&["sliding_window"], 4096)?) } else { None });
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let experts = c.size(&["num_experts", "num_local_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 8)?;
    let gate = Gate::softmax(experts, top_k, c.flag_or("norm_topk_prob", false)?).checked()?;
    let sparse = sparse_layers(c, b.layers)?;
    let dense_width = c.size(&["intermediate_size"])?;
    let inter = c.size(&["moe_intermediate_size"])?;

    let geometry = b.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let own = format!("{prefix}.self_attn");
        let attention = b.attention(w, &own, bias, rotary)?;
        let attention = Attention { norm: b.head_norm(w, &own)?, visible, ..attention };
        let ffn = match sparse.contains(&l) {
            true => Ffn::moe(b.moe(w, l, &format!("{prefix}.mlp.gate"), gate.clone())?),
            false => Ffn::Dense(b.mlp(w, &format!("{prefix}.mlp"), dense_width, false)?),
        };
        b.layer(w, &prefix, attention, ffn)
    })
}
