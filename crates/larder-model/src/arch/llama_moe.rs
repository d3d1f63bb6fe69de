//! LLaMA-MoE: the MLPs of LLaMA 2 split into experts, after a router of two matmuls.
//!
//! ```text
//! x += attention(rms(x))                    RoPE
//! x += Σ_k weight · expert(rms(x))          softmax of the top k, times a factor; logits: second(tanh(first(rms(x))))
//! ```

use larder_core::{ExpertNames, Gate, LayerIdx, Renorm, TensorSlice, Weighting};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Moe, MoeRouter, Rope};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-6, ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?;
    let experts = config.size_or(&["num_experts"], 16)?;
    let top_k = config.size_or(&["num_selects"], 4)?;
    let width = config.size_or(&["intermediate_size"], 11008)?;
    if !width.is_multiple_of(experts) {
        return Err(config_error(format!("intermediate_size {width} is not a multiple of num_experts {experts}")));
    }
    let inter = width / experts;
    let two_products = two_products(config)?;
    check_fixed(config);
    check_sizes(config, &basics, experts, inter)?;
    let factors = factors(config, basics.layers)?;
    let gate = Gate::softmax(experts, top_k, true).checked()?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let part = |name| TensorSlice::whole(format!("model.layers.{{l}}.mlp.calculator.experts.weight_{name}.{{e}}"));
    let names = ExpertNames { matrices: ["gate", "up", "down"].map(part).into(), bias: None };
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), AttentionBias::NONE, rotary)?;
        let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 0.0 }, scale: factors[layer] };
        let gate = Gate { weighting, ..gate.clone() };
        let network = format!("{prefix}.mlp.gate.gate_network");
        let first = if two_products { format!("{network}.0") } else { network.clone() };
        let product = weights.linear(&first, experts, basics.hidden, false)?;
        let router = if two_products {
            MoeRouter::TwoProducts(product, weights.linear(&format!("{network}.2"), experts, experts, false)?)
        } else {
            MoeRouter::Product(product)
        };
        let moe = Moe::new(LayerIdx(layer as u16), router, gate, basics.act);
        basics.layer(weights, &prefix, attention, Ffn::moe(moe))
    })
}

/// Whether the router has a second matmul after a tanh.
fn two_products(config: &mut Config) -> Result<bool> {
    match config.opt_text("gate_network")?.unwrap_or("mlp") {
        "mlp" => Ok(true),
        "linear" => Ok(false),
        other => Err(config_error(format!("gate_network '{other}' is not supported; supported are mlp and linear"))),
    }
}

/// The factor on the weights of each layer: one number, or a list.
fn factors(config: &mut Config, layers: usize) -> Result<Vec<f32>> {
    let key = "score_scale_factor";
    let all = if config.is_list(key) {
        config.opt_numbers(key)?.unwrap_or_default()
    } else {
        vec![config.number_or(key, 1.0)?; layers]
    };
    if all.len() == layers {
        Ok(all.into_iter().map(|factor| factor as f32).collect())
    } else {
        Err(config_error(format!("{key} has {} entries for {layers} layers", all.len())))
    }
}

/// `size_experts`, the widths of all experts of each layer, has to give each the same share.
fn check_sizes(config: &mut Config, basics: &Basics, experts: usize, inter: usize) -> Result<()> {
    let Some(layers) = config.opt_lists_of_counts("size_experts")? else { return Ok(()) };
    if layers.len() == basics.layers && layers.iter().all(|sizes| *sizes == vec![inter; experts]) {
        Ok(())
    } else {
        Err(config_error(format!(
            "size_experts must have {experts} experts of width {inter} in each of {} layers; experts of different widths \
             are not supported",
            basics.layers
        )))
    }
}

/// Keys that have to be as they are here, and keys without effect.
fn check_fixed(config: &mut Config) {
    for (key, only) in [("gate_use_softmax", true), ("multiply_gate_scores", true), ("add_weight_norm", false)] {
        config.only(key, only);
    }
    for (key, only) in [("gate_type", "TopKBalancedNoisyGate"), ("calculator_type", "UniversalCalculator")] {
        config.only(key, only);
    }
    // Of training, and of calculators that are refused above.
    config.ignore(&["gate_add_noise", "gate_balance_loss_weight", "gate_noise_epsilon", "gate_use_balance"]);
    config.ignore(&["capacity_factor", "drop_tokens", "dropped_padding"]);
}
