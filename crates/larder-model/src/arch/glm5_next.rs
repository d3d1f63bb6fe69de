//! GLM-5-Next (GLM-5.3-Flash): Kimi Delta Attention in most layers, latent attention without positions in the others,
//! to blocks of tokens that an indexer chooses; several residual streams, the experts of DeepSeek-V3.
//!
//! ```text
//! streams = embedding, several times        mHC: each part reads a mixture of the streams and writes to all of them
//! part = kimi_delta(rms(read))              linear attention with a decay per channel, usually bounded
//! part = latent_attention(rms(read))        the others: to the blocks that the indexer scores highest and the incomplete one
//! part = mlp(rms(read))                     first layers
//! part = Σ_k weight · expert(y) + shared(y) the others: y = rms(read); gate of DeepSeek-V3, activations clamped
//! logits = head(rms(mean of the streams))
//! ```

use larder_core::ExpertNames;

use super::common::{Basics, Defaults, layer_types};
use super::deepseek_family::{FfnDefaults, FfnParts, Indexers, LatentDefaults, latent_shape};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use super::deepseek_v4::stream_shape;
use super::deepseek_v32::indexer_shape;
use super::glm_moe_dsa::own_indexers;
use super::kimi_linear::{HybridMixers, LinearSizes, TYPES};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{IndexerShape, LatentShape, ManifoldConnection, MeanMerge, Rope};
use crate::ops::{Activation, ChannelDecay};
use crate::stack::{Branch, Layer, Stack, Streams};
use crate::weights::WeightLoader;

/// The name of latent attention in newer configs.
const INDEXED: &str = "indexed_attention";

/// The most tokens of a block, which are kept until it is complete.
const MOST_TOKENS: usize = 4096;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    // Nothing is rotated; heads have widths of their own, which newer configs do not have under this name.
    config.ignore(&["rope_theta", "rope_scaling", "rope_parameters"]);
    config.leave_out(&["head_dim"]);
    for flag in ["mla_use_nope", "mhc", "index_kpool_always_select_tail"] {
        config.only(flag, true);
    }
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-5, head_dim: Some(1), ..Defaults::COMMON })?;
    let mixers = mixers(config, &basics)?;
    let streams = stream_shape(config, &basics)?;
    let basics = Basics { act: clamped(config, basics.act)?, ..basics };
    let gate = parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 2.5, renorm: true })?;
    let parts =
        FfnParts::parse(config, basics.layers, FfnDefaults { dense_layers: 3, shared_experts: 1, typed: true })?;

    let geometry = basics.geometry(parts.sparse.clone(), gate.experts, gate.top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let stack = basics.stack(weights, None::<Rope>, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let mixer = mixers.mixer(weights, layer)?;
        let ffn = parts.ffn(&basics, weights, layer, &gate, with_bias, false)?;
        let mut connection = |part: &str| ManifoldConnection::load(weights, &format!("{prefix}.hc_{part}"), streams);
        let (to_mixer, to_ffn) = (connection("attn")?, connection("ffn")?);
        let mut norm = |name: &str| basics.norm(weights, &format!("{prefix}.{name}"), basics.hidden);
        let (mixer_norm, ffn_norm) = (norm("input_layernorm")?, norm("post_attention_layernorm")?);
        let mixer = Branch::new(mixer_norm, mixer).connected(to_mixer);
        Ok(Layer::new(mixer, Branch::new(ffn_norm, ffn).connected(to_ffn)))
    })?;
    let merge = Box::new(MeanMerge { streams: streams.streams });
    Ok(Stack { streams: Some(Streams { count: streams.streams, merge }), ..stack })
}

/// The activation of experts and MLPs.
fn clamped(config: &mut Config, act: Activation) -> Result<Activation> {
    let limit = config.positive_or("swiglu_limit", 10.0)? as f32;
    match act {
        Activation::Silu => Ok(Activation::ClampedSilu { limit }),
        _ => Err(config_error("hidden_act must be silu for this model")),
    }
}

fn mixers(config: &mut Config, basics: &Basics) -> Result<HybridMixers> {
    let linear = linear_layers(config, basics.layers)?;
    let (sizes, bound) = linear_sizes(config)?;
    let defaults = LatentDefaults { q_rank: Some(1536), nope: 256, rope: 0, value: 256, eps: basics.eps };
    let latent = LatentShape { norm_eps: basics.eps, ..latent_shape(config, basics, &defaults)? };
    if latent.rope != 0 {
        return Err(config_error(format!("qk_rope_head_dim is {}; it must be 0 for this model", latent.rope)));
    }
    let indexers = indexers(config, &latent, &linear)?;
    Ok(HybridMixers {
        linear,
        delta: sizes.delta(basics, bound.map_or(ChannelDecay::Softplus, ChannelDecay::Bounded)),
        a_log: vec![sizes.heads],
        latent,
        bias: config.flag_or("attention_bias", false)?,
        rotary: None,
        scale: (latent.nope as f64).powf(-0.5),
        gated: false,
        indexers: Some(indexers),
        name: "self_attn",
    })
}

/// Whether each layer has linear attention: by `layer_types`, else all but every fourth.
fn linear_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let types = layer_types(config, layers, &[TYPES[0], TYPES[1], INDEXED])?;
    Ok((0..layers).map(|layer| types.as_ref().map_or(layer % 4 != 3, |types| types[layer] == TYPES[0])).collect())
}

/// Sizes of linear attention, and the bound of its decays. Which layers have it, other keys say.
fn linear_sizes(config: &mut Config) -> Result<(LinearSizes, Option<f32>)> {
    let default = if config.contains("linear_lower_bound") { None } else { Some(-5.0) };
    let mut bound = config.opt_number("linear_lower_bound")?.or(default);
    let sizes = LinearSizes::parse(config, 64, |own| {
        own.ignore(&["full_attn_layers", "kda_layers"]);
        if own.contains("gate_lower_bound") {
            bound = own.opt_number("gate_lower_bound")?;
        }
        if own.flag_or("safe_gate", true)? {
            bound = bound.or(Some(-5.0));
        }
        Ok(())
    })?;
    Ok((sizes, bound.map(|bound| bound as f32)))
}

/// The indexers, each of which chooses blocks of tokens. Only a layer that follows one of latent attention can use its
/// choice.
fn indexers(config: &mut Config, latent: &LatentShape, linear: &[bool]) -> Result<Indexers> {
    let own = own_indexers(config, linear.len())?;
    if let Some(layer) = (0..linear.len()).find(|at| !linear[*at] && !own[*at] && (*at == 0 || linear[*at - 1])) {
        return Err(config_error(format!("layer {layer} shares the indexer of a layer before it that has none")));
    }
    let shape = indexer_shape(config, latent, 32)?;
    let block = config.size_or(&["index_kpool"], 16)?;
    if block > MOST_TOKENS || !shape.top_k.is_multiple_of(block) {
        return Err(config_error(format!(
            "index_kpool is {block}; it must be at most {MOST_TOKENS} and divide index_topk {}",
            shape.top_k
        )));
    }
    Ok(Indexers { shape: IndexerShape { block: Some(block), ..shape }, interleaved: false, own })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn decays_are_bounded_unless_the_config_says_otherwise() {
        let bound = |json: Value| linear_sizes(&mut Config::new(&json).unwrap()).unwrap().1;
        assert_eq!(bound(json!({})), Some(-5.0));
        assert_eq!(bound(json!({"linear_lower_bound": null})), None);
        assert_eq!(bound(json!({"linear_lower_bound": -2.0})), Some(-2.0));
        let nested = |own: Value| bound(json!({"linear_lower_bound": null, "linear_attn_config": own}));
        assert_eq!(nested(json!({})), Some(-5.0));
        assert_eq!(nested(json!({"safe_gate": false})), None);
        assert_eq!(nested(json!({"safe_gate": false, "gate_lower_bound": -3.0})), Some(-3.0));
    }

    #[test]
    fn an_indexer_is_shared_by_adjacent_layers_only() {
        let latent = |json: &Value| {
            let mut config = Config::new(json).unwrap();
            let basics = json!({"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 3,
                "max_position_embeddings": 16, "head_dim": 8});
            let basics = Basics::parse(&mut Config::new(&basics).unwrap(), "rms_norm_eps", Defaults::COMMON).unwrap();
            let defaults = LatentDefaults { q_rank: Some(4), rope: 0, ..LatentDefaults::COMMON };
            let latent = latent_shape(&mut config, &basics, &defaults).unwrap();
            indexers(&mut config, &latent, &[true, false, false]).map(|indexers| indexers.shape.top_k).ok()
        };
        let types = |third: &str| json!({"indexer_types": ["full", "full", third], "index_topk": 32});
        assert_eq!((latent(&types("full")), latent(&types("shared"))), (Some(32), Some(32)));
        assert_eq!(latent(&json!({"indexer_types": ["full", "shared", "full"], "index_topk": 32})), None);
        assert_eq!(latent(&json!({"index_topk": 30})), None, "blocks of 16");
    }
}
