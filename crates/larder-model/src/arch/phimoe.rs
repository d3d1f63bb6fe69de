//! Phi-3.5-MoE: layer norms with biases, long rotary positions, and the sparsemixer gate over two experts.

use larder_core::{ExpertNames, Gate, Score, Weighting};

use super::common::{Basics, Bias, Defaults, window};
use crate::config::Config;
use crate::decoder::{Ffn, Layer, Stack};
use crate::error::Result;
use crate::nn::{Attention, Norm, Rope};
use crate::weights::Weights;

pub fn build(c: &mut Config, w: &mut Weights) -> Result<Stack> {
    let mut b = Basics::parse(c, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    b.head_bias = c.flag_or("lm_head_bias", false)?;
    let (rope, rotary) = Rope::parse(c, b.head_dim, 1e6, b.context, None)?;
    let visible = window(c.opt_size(&["sliding_window"])?);
    let bias = Bias::all(c.flag_or("attention_bias", false)?);
    let experts = c.size(&["num_local_experts", "num_experts"])?;
    let eps = c.number_or("router_jitter_noise", 0.01)? as f32; // used when running too, in spite of its name
    let weighting = Weighting::SparseMixer { eps };
    let top_k = c.size_or(&["num_experts_per_tok"], 2)?;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = c.size(&["intermediate_size"])?;

    let geometry = b.geometry((0..b.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    let norm = |w: &mut Weights| Norm::layer(w, "model.norm", b.hidden, b.eps);
    let layer = |w: &mut Weights, l: usize| {
        let prefix = format!("model.layers.{l}");
        let attention = b.attention(w, &format!("{prefix}.self_attn"), bias, rotary)?;
        Ok(Layer {
            mixer_norm: Norm::layer(w, &format!("{prefix}.input_layernorm"), b.hidden, b.eps)?,
            mixer: Box::new(Attention { visible, ..attention }),
            ffn_norm: Norm::layer(w, &format!("{prefix}.post_attention_layernorm"), b.hidden, b.eps)?,
            ffn: Ffn::moe(b.moe(w, l, &format!("{prefix}.block_sparse_moe.gate"), gate.clone())?),
        })
    };
    b.stack_with(w, rope, geometry, names, layer, norm)
}
