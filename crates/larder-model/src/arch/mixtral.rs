//! Mixtral: grouped-query attention and a few wide experts, whose weights always sum to one.

use larder_core::{ExpertNames, Gate};

use super::common::{Basics, Bias, Defaults, window};
use crate::config::Config;
use crate::decoder::{Ffn, Stack};
use crate::error::Result;
use crate::nn::{Attention, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e6, b.context, None)?;
    let visible = window(c.opt_size(&["sliding_window"])?);
    let experts = c.size(&["num_local_experts", "num_experts"])?;
    let gate = Gate::softmax(experts, c.size_or(&["num_experts_per_tok"], 2)?, true).checked()?;
    let inter = c.size(&["intermediate_size"])?;
    c.ignore(&["router_jitter_noise"]); // used in training only

    let geometry = b.geometry((0..b.layers).collect(), experts, gate.top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    b.stack(w, rope, geometry, names, |w, l| {
        let prefix = format!("model.layers.{l}");
        let attention = b.attention(w, &format!("{prefix}.self_attn"), Bias::NO, rotary)?;
        let moe = b.moe(w, l, &format!("{prefix}.block_sparse_moe.gate"), gate.clone())?;
        b.layer(w, &prefix, Attention { visible, ..attention }, Ffn::moe(moe))
    })
}
