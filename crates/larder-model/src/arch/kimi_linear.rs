//! Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, the experts of
//! DeepSeek-V3.
//!
//! ```text
//! x += kimi_delta(rms(x))                   linear attention with a decay per channel; three of four layers
//! x += latent_attention(rms(x))             the others: as DeepSeek-V3, not rotated
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use larder_core::ExpertNames;

use super::common::{Basics, Defaults, layer_types};
use super::deepseek_family::{FfnDefaults, FfnParts, Indexers, LatentDefaults, latent_shape};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{KimiDelta, KimiDeltaShape, LatentAttention, LatentShape, Mixer, Rope};
use crate::ops::{ChannelDecay, GateFunction, Rotary};
use crate::stack::Stack;
use crate::weights::WeightLoader;

/// Keys behind their usual names.
pub const KEYS: &[(&str, &str)] = &[
    ("max_position_embeddings", "model_max_length"),
    ("norm_topk_prob", "moe_renormalize"),
    ("n_group", "num_expert_group"),
    ("num_experts_per_tok", "num_experts_per_token"),
];

/// The names of the two types of layers.
pub const TYPES: &[&str] = &["linear_attention", "full_attention"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    config.also_named(KEYS);
    // Nothing is rotated; the reference has groups of experts whatever their flag says.
    config.ignore(&["rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk"]);
    config.only("mla_use_nope", true);
    let basics = parse_basics(config, 1e-5)?;
    let (sizes, linear) = linear_layers(config, basics.layers)?;
    let latent = latent_shape(config, &basics, &LatentDefaults::COMMON)?;
    let mixers = HybridMixers {
        linear,
        delta: sizes.delta(&basics, ChannelDecay::Softplus),
        a_log: vec![1, 1, sizes.heads, 1],
        latent,
        bias: config.flag_or("attention_bias", false)?,
        rotary: None,
        scale: ((latent.nope + latent.rope) as f64).powf(-0.5),
        gated: false,
        indexers: None,
        name: "self_attn",
    };
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 2.446, renorm: true })?;
    let parts =
        FfnParts::parse(config, basics.layers, FfnDefaults { dense_layers: 1, shared_experts: 1, typed: true })?;
    let parts = FfnParts { name: "block_sparse_moe", ..parts };

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.block_sparse_moe.experts", "w1", "w3", "w2");
    basics.stack(weights, None::<Rope>, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let mixer = mixers.mixer(weights, layer)?;
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        basics.layer_of(weights, &prefix, mixer, ffn)
    })
}

/// The shared keys; heads have widths of their own, and the output head is never that of the embedding.
pub fn parse_basics(config: &mut Config, eps: f64) -> Result<Basics> {
    let defaults = Defaults { eps, head_dim: Some(1), ..Defaults::COMMON };
    Ok(Basics { tied: false, ..Basics::parse(config, "rms_norm_eps", defaults)? })
}

/// The mixers of a model with two types of layers: Kimi Delta Attention and latent attention.
pub struct HybridMixers {
    /// Whether a layer has linear attention.
    pub linear: Vec<bool>,
    /// Linear attention.
    pub delta: KimiDeltaShape,
    /// Shape of `A_log`, which has a value per head of linear attention.
    pub a_log: Vec<usize>,
    /// The other layers.
    pub latent: LatentShape,
    /// Whether matmuls of latent attention have biases.
    pub bias: bool,
    /// Rotation in latent attention.
    pub rotary: Option<Rotary>,
    /// Factor on the scores of latent attention.
    pub scale: f64,
    /// Whether the output of latent attention is gated per head.
    pub gated: bool,
    /// Choose the positions that latent attention goes over.
    pub indexers: Option<Indexers>,
    /// Name of the mixer in a layer.
    pub name: &'static str,
}

impl HybridMixers {
    /// The mixer of a layer.
    pub fn mixer(&self, weights: &mut WeightLoader, layer: usize) -> Result<Box<dyn Mixer>> {
        let prefix = format!("model.layers.{layer}.{}", self.name);
        if self.linear[layer] {
            return Ok(Box::new(KimiDelta::new(weights, &prefix, self.delta, &self.a_log)?));
        }
        let LatentShape { hidden, heads, .. } = self.latent;
        let mut attention = LatentAttention::new(weights, &prefix, self.latent, self.bias, self.rotary, self.scale)?;
        if let Some(indexers) = &self.indexers {
            attention = attention.with_choice(indexers.choice(weights, &prefix, layer, self.rotary)?);
        }
        if self.gated {
            let product = weights.linear(&format!("{prefix}.g_proj"), heads, hidden, false)?;
            attention = attention.with_output_gate(product, GateFunction::Sigmoid);
        }
        Ok(Box::new(attention))
    }
}

/// Sizes of linear attention.
pub struct LinearSizes {
    pub heads: usize,
    /// Width of a head's keys and values.
    pub dim: usize,
    /// Width of the convolutions.
    pub conv: usize,
}

impl LinearSizes {
    /// The form of the layers that these models have in common.
    pub fn delta(&self, basics: &Basics, decay: ChannelDecay) -> KimiDeltaShape {
        KimiDeltaShape {
            hidden: basics.hidden,
            heads: self.heads,
            dim: self.dim,
            conv: self.conv,
            act: basics.act,
            low_rank: true,
            decay,
            eps: basics.eps,
            output: "o_proj",
        }
    }

    /// From `linear_attn_config`, whose other keys `read` reads, or the keys of newer configs; `heads` by default.
    pub fn parse(config: &mut Config, heads: usize, read: impl FnOnce(&mut Config) -> Result<()>) -> Result<Self> {
        let newer = LinearSizes {
            heads: config.size_or(&["linear_num_heads"], heads)?,
            dim: config.size_or(&["linear_head_dim"], 128)?,
            conv: config.size_or(&["linear_conv_kernel_dim"], 4)?,
        };
        let Some(mut own) = config.opt_object("linear_attn_config", "linear_attn_config.")? else { return Ok(newer) };
        let sizes = LinearSizes {
            heads: own.size_or(&["num_heads"], newer.heads)?,
            dim: own.size_or(&["head_dim"], newer.dim)?,
            conv: own.size_or(&["short_conv_kernel_size"], newer.conv)?,
        };
        read(&mut own)?;
        own.finish();
        Ok(sizes)
    }
}

/// Sizes of linear attention, and whether each layer has it: by `layer_types`, else by the lists of
/// `linear_attn_config`, which count from one, else all but every fourth behind the first.
fn linear_layers(config: &mut Config, layers: usize) -> Result<(LinearSizes, Vec<bool>)> {
    let types = layer_types(config, layers, TYPES)?;
    let mut listed = None;
    let sizes = LinearSizes::parse(config, 32, |own| {
        if let (Some(full), Some(linear)) = (own.opt_counts("full_attn_layers")?, own.opt_counts("kda_layers")?) {
            listed = Some(listed_layers(layers, &full, &linear)?);
        }
        Ok(())
    })?;
    let typed = types.map(|types| types.iter().map(|kind| *kind == TYPES[0]).collect());
    let default = || (0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect();
    Ok((sizes, typed.or(listed).unwrap_or_else(default)))
}

/// Whether each layer has linear attention, by two lists that count from one.
fn listed_layers(layers: usize, full: &[usize], linear: &[usize]) -> Result<Vec<bool>> {
    let (mut is_linear, mut listed) = (vec![false; layers], vec![false; layers]);
    for (number, kind) in full.iter().map(|n| (n, false)).chain(linear.iter().map(|n| (n, true))) {
        match number.checked_sub(1).filter(|layer| *layer < layers && !listed[*layer]) {
            Some(layer) => (is_linear[layer], listed[layer]) = (kind, true),
            None => return Err(lists_error(layers)),
        }
    }
    if listed.contains(&false) { Err(lists_error(layers)) } else { Ok(is_linear) }
}

fn lists_error(layers: usize) -> crate::error::ModelError {
    config_error(format!(
        "linear_attn_config.full_attn_layers and kda_layers must together have each number from 1 to {layers} once"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn linear(json: Value) -> Option<(Vec<bool>, usize, usize)> {
        let (sizes, layers) = linear_layers(&mut Config::new(&json).unwrap(), 3).ok()?;
        Some((layers, sizes.heads, sizes.dim))
    }

    #[test]
    fn layers_are_listed_from_one_or_typed() {
        let lists = json!({"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 2});
        let with = |key: &str, value: Value| {
            let mut json = json!({"linear_attn_config": lists.clone()});
            json[key] = value;
            linear(json)
        };
        assert_eq!(with("linear_head_dim", json!(8)), Some((vec![true, true, false], 2, 8)));
        let typed = json!(["full_attention", "linear_attention", "linear_attention"]);
        assert_eq!(with("layer_types", typed), Some((vec![false, true, true], 2, 128)));
        assert_eq!(linear(json!({})), Some((vec![true; 3], 32, 128)));
        for (full, kda) in [(json!([0]), json!([1, 2])), (json!([3]), json!([1])), (json!([3, 1]), json!([1, 2]))] {
            let lists = json!({"full_attn_layers": full, "kda_layers": kda});
            assert_eq!(linear(json!({"linear_attn_config": lists.clone()})), None, "{lists}");
        }
    }
}
