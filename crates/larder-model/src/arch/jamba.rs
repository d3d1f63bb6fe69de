//! Jamba: Mamba 1 in most layers, attention without positions in the others; experts in every other layer.
//!
//! ```text
//! x += mamba1(rms(x))                       most layers; RMS norms of dt, B and C
//! x += attention(rms(x))                    one of eight: grouped queries, no positions
//! x += mlp(rms(x))                          layers without experts
//! x += Σ_k weight · expert(rms(x))          the others: softmax, top k, not renormalised
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Mamba1, Mamba1Shape, Mixer, Rope};
use crate::ops::Rotary;
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(8), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let experts = config.size_or(&["num_experts", "num_local_experts"], 16)?;
    let gate = Gate::softmax(experts, config.size_or(&["num_experts_per_tok"], 2)?, false).checked()?;
    let inter = config.size(&["intermediate_size"])?;
    let attends = every(config, basics.layers, ["attn_layer_period", "attn_layer_offset"], [8, 4])?;
    let mut sparse = every(config, basics.layers, ["expert_layer_period", "expert_layer_offset"], [2, 1])?;
    sparse.iter_mut().for_each(|sparse| *sparse &= experts > 1);
    let shape = mamba_shape(config, &basics)?;
    check_others(config);

    let moe_layers = (0..basics.layers).filter(|layer| sparse[*layer]).collect();
    let geometry = basics.geometry(moe_layers, experts, gate.top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.feed_forward.experts", "gate_proj", "up_proj", "down_proj");
    let norm = |weights: &mut WeightLoader| basics.norm(weights, "model.final_layernorm", basics.hidden);
    let build_layer = |weights: &mut WeightLoader, layer: usize| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = if attends[layer] {
            let own = format!("{prefix}.self_attn");
            Box::new(basics.attention(weights, &own, AttentionBias::NONE, None::<Rotary>)?)
        } else {
            Box::new(Mamba1::new(weights, &format!("{prefix}.mamba"), basics.hidden, shape)?)
        };
        let own = format!("{prefix}.feed_forward");
        let ffn = if sparse[layer] {
            Ffn::moe(basics.moe(weights, layer, &format!("{own}.router"), gate.clone())?)
        } else {
            Ffn::dense(basics.mlp(weights, &own, inter, false)?)
        };
        let mut norm = |name: &str| basics.norm(weights, &format!("{prefix}.{name}"), basics.hidden);
        Ok(Layer::new(Branch::new(norm("input_layernorm")?, mixer), Branch::new(norm("pre_ff_layernorm")?, ffn)))
    };
    basics.stack_with(weights, None::<Rope>, geometry, names, build_layer, norm)
}

fn mamba_shape(config: &mut Config, basics: &Basics) -> Result<Mamba1Shape> {
    Ok(Mamba1Shape {
        inner: config.size_or(&["mamba_expand"], 2)? * basics.hidden,
        state: config.size_or(&["mamba_d_state"], 16)?,
        rank: config.opt_size_or_auto(&["mamba_dt_rank"])?.unwrap_or(basics.hidden.div_ceil(16)),
        conv: config.size_or(&["mamba_d_conv"], 4)?,
        conv_bias: config.flag_or("mamba_conv_bias", true)?,
        bias: config.flag_or("mamba_proj_bias", false)?,
        act: basics.act,
        eps: basics.eps,
    })
}

/// For each layer, whether it is one of those that occur once in a period, at an offset.
fn every(config: &mut Config, layers: usize, keys: [&str; 2], defaults: [usize; 2]) -> Result<Vec<bool>> {
    let period = config.size_or(&keys[..1], defaults[0])?;
    let offset = config.count_or(&keys[1..], defaults[1])?;
    if offset >= period {
        return Err(config_error(format!("{} is {offset}; it must be below {}, {period}", keys[1], keys[0])));
    }
    Ok((0..layers).map(|layer| layer % period == offset).collect())
}

/// Keys that have to be as they are here, and keys without effect.
fn check_others(config: &mut Config) {
    config.only("mamba_inner_layernorms", true);
    config.ignore(&[
        "calc_logits_for_entire_prompt",
        "n_ctx",
        "sliding_window", // not read by the reference
        "use_associative_scan",
        "use_mambapy",
    ]);
}
