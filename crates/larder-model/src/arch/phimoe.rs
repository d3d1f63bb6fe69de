//! Phi-3.5-MoE: layer norms with biases, longrope, and the sparsemixer gate over two experts.
//!
//! ```text
//! x += attention(layer_norm(x))             grouped queries, biases, RoPE with longrope
//! x += Σ_2 weight · expert(layer_norm(x))   sparsemixer gate
//! ```

use larder_core::{ExpertNames, Gate, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults, sliding_window};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Norm, Rope};
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let mut basics = Basics::parse(config, "rms_norm_eps", Defaults { kv_heads: Some(8), ..Defaults::COMMON })?;
    basics.head_bias = config.flag_or("lm_head_bias", false)?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e6, basics.context, None)?;
    let mask = sliding_window(config.opt_size(&["sliding_window"])?);
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size(&["num_local_experts", "num_experts"])?;
    let eps = config.number_or("router_jitter_noise", 0.01)? as f32; // used in inference too, despite its name
    let weighting = Weighting::SparseMixer { eps };
    let top_k = config.size_or(&["num_experts_per_tok"], 2)?;
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = config.size(&["intermediate_size"])?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    let norm = |weights: &mut WeightLoader| Norm::layer(weights, "model.norm", basics.hidden, basics.eps);
    let build_layer = |weights: &mut WeightLoader, layer: usize| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
        let mut norm = |name: &str| Norm::layer(weights, &format!("{prefix}.{name}"), basics.hidden, basics.eps);
        let [mixer_norm, ffn_norm] = [norm("input_layernorm")?, norm("post_attention_layernorm")?];
        let moe = basics.moe(weights, layer, &format!("{prefix}.block_sparse_moe.gate"), gate.clone())?;
        let attention = Box::new(Attention { mask, ..attention });
        Ok(Layer::new(Branch::new(mixer_norm, attention), Branch::new(ffn_norm, Ffn::moe(moe))))
    };
    basics.stack_with(weights, rope, geometry, names, build_layer, norm)
}
