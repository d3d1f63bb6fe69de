//! SmallThinker: the router reads what the layer gets, before attention; experts whose gate is a ReLU.
//!
//! ```text
//! r  = router(x)                            the residual stream, not normalised
//! x += attention(rms(x))                    grouped queries; RoPE and sliding windows by layer
//! x += Σ_k weight · expert(rms(x))          top k of r; their sigmoids divided by the sum, or their softmax
//! ```

use larder_core::{ExpertNames, Gate, Score, Weighting};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{Attention, Moe, Rope};
use crate::ops::Activation;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(128), tied: true };
    let mut basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    basics.act = Activation::Relu;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 1e6, basics.context, None)?;
    let rotates = layout(config, "rope_layout", basics.layers, true)?;
    let slides = layout(config, "sliding_window_layout", basics.layers, false)?;
    let window = AttentionMask::SlidingWindow(config.size_or(&["sliding_window_size"], 4096)?);
    let experts = config.size_or(&["moe_num_primary_experts"], 32)?;
    let top_k = config.size_or(&["moe_num_active_primary_experts"], 4)?;
    let weighting = if config.flag_or("moe_primary_router_apply_softmax", false)? {
        Weighting::SoftmaxOfChosen
    } else {
        Weighting::SigmoidShareOfChosen
    };
    let gate = Gate { score: Score::Raw, weighting, ..Gate::softmax(experts, top_k, false) }.checked()?;
    let inter = config.size_or(&["moe_ffn_hidden_size"], 768)?;
    check_fixed(config, basics.layers)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "gate", "up", "down");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), AttentionBias::NONE, rotary)?;
        let attention = Attention {
            rotary: rotates[layer].then_some(rotary),
            mask: if slides[layer] { window } else { AttentionMask::Causal },
            ..attention
        };
        let moe = basics.moe(weights, layer, &format!("{prefix}.block_sparse_moe.primary_router"), gate.clone())?;
        basics.layer(weights, &prefix, attention, Ffn::moe(Moe { early: true, ..moe }))
    })
}

/// A list of 0 or 1 for each layer; `usual` for all if the config does not have it.
fn layout(config: &mut Config, key: &str, layers: usize, usual: bool) -> Result<Vec<bool>> {
    let Some(given) = config.opt_counts(key)? else { return Ok(vec![usual; layers]) };
    if given.len() == layers && given.iter().all(|flag| *flag < 2) {
        Ok(given.into_iter().map(|flag| flag == 1).collect())
    } else {
        Err(config_error(format!("{key} must have 0 or 1 for each of {layers} layers")))
    }
}

/// Keys of parts that no published model has, and for which the reference knows one value each.
fn check_fixed(config: &mut Config, layers: usize) -> Result<()> {
    config.only("moe_enable_early_router", true);
    if layout(config, "moe_layer_layout", layers, true)?.contains(&false) {
        return Err(config_error("moe_layer_layout must be 1 for all layers of smallthinker"));
    }
    // The reference always divides by the sum; it keeps the windows under the usual names too; the others are of parts
    // that are refused above.
    config.ignore(&["norm_topk_prob", "sliding_window", "sliding_window_pattern", "dense_ffn_hidden_size"]);
    config.ignore(&["moe_num_secondary_experts", "moe_secondary_expert_size", "model_name", "profile_sparsity"]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    #[test]
    fn parts_that_no_published_model_has_are_refused() {
        let built = |key: &str, value: Value| {
            let mut json = json!({
                "model_type": "smallthinker", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                "num_hidden_layers": 2, "max_position_embeddings": 16, "moe_num_primary_experts": 4,
                "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 4,
            });
            json[key] = value;
            crate::blueprint(&json).map(|_| ()).map_err(|e| e.to_string())
        };
        assert_eq!(built("rope_layout", json!([0, 1])), Ok(()));
        for (key, value) in [
            ("moe_enable_early_router", json!(false)),
            ("moe_enable_secondary_experts", json!(true)),
            ("use_qk_norm", json!(true)),
            ("moe_shared_primary_experts", json!(1)),
            ("moe_layer_layout", json!([1, 0])),
            ("rope_layout", json!([1])),
            ("sliding_window_layout", json!([0, 2])),
        ] {
            let refusal = built(key, value).unwrap_err();
            assert!(refusal.contains(key), "{key}: {refusal}");
        }
    }
}
