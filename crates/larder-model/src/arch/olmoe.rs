//! OLMoE: queries and keys normalised over their whole projection, many narrow experts.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Bias, Defaults};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, HeadNorm, Norm, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults::COMMON)?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e4, b.context, None)?;
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let clip = c.opt_number("clip_qkv")?;
    let experts = c.size(&["num_experts", "num_local_experts"])?;
    let top_k = c.size_or(&["num_experts_per_tok"], 8)?;
    let gate = Gate::softmax(experts, top_k, c.flag_or("norm_topk_prob", false)?).checked()?;
    let inter = c.size(&["intermediate_size"])?;

    let geometry = b.geometry((0..b.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let own = format!("{prefix}.self_attn");
        let attention = b.attention(w, &own, bias, rotary)?;
        let q_norm = Norm::rms(w, &format!("{own}.q_norm"), b.heads * b.head_dim, b.eps)?;
        let k_norm = Norm::rms(w, &format!("{own}.k_norm"), b.kv_heads * b.head_dim, b.eps)?;
        let attention = Attention { norm: HeadNorm::Whole(q_norm, k_norm), clip, ..attention };
        let moe = b.moe(w, l, &format!("{prefix}.mlp.gate"), gate.clone())?;
        b.layer(w, &prefix, attention, Ffn::moe(moe))
    })
}
