//! DeepSeek-V3.2: version 3 with sparse attention (DSA): an indexer in each layer chooses the positions to attend to.
//!
//! ```text
//! x += latent_attention(rms(x))             as DeepSeek-V3, to the index_topk positions that the indexer scores highest
//! x += mlp(rms(x))                          first layers
//! x += Σ_k weight · expert(y) + shared(y)   the others: as DeepSeek-V3
//! ```

use super::common::Basics;
use super::deepseek_family::{Family, FfnDefaults, Indexers, LatentDefaults, build_with};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{IndexerShape, LatentShape, Rope};
use crate::ops::Rotary;
use crate::stack::Stack;
use crate::weights::WeightLoader;

/// Keys that the reference does not read: it knows one way to rotate, and one kind of layer.
pub const UNREAD_KEYS: &[&str] = &["rope_interleave", "indexer_rope_interleave", "layer_types"];

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    config.ignore(UNREAD_KEYS);
    let family = Family {
        latent: LatentDefaults { q_rank: Some(1536), ..LatentDefaults::COMMON },
        ffn: FfnDefaults { dense_layers: 3, shared_experts: 1, typed: true },
        rope: interleaved_rope,
        gate: |config| parse_gate(config, GateDefaults { groups: 8, keep: 4, scale: 2.5, renorm: true }),
        layer_gate: with_bias,
        temperature: None,
        indexers: |config, basics, shape| {
            let shape = indexer_shape(config, shape, 64)?;
            Ok(Some(Indexers { shape, interleaved: false, own: vec![true; basics.layers] }))
        },
    };
    build_with(config, weights, family)
}

/// The rotation, always in adjacent pairs.
pub fn interleaved_rope(config: &mut Config, basics: &Basics, shape: &LatentShape) -> Result<(Rope, Rotary)> {
    let (rope, rotary) = Rope::parse(config, shape.rope, 1e4, basics.context, None)?;
    Ok((rope, Rotary { interleaved: true, ..rotary }))
}

/// Reads the sizes of indexers, which have `heads` heads by default.
pub fn indexer_shape(config: &mut Config, latent: &LatentShape, heads: usize) -> Result<IndexerShape> {
    let q_rank = latent.q_rank.ok_or_else(|| config_error("q_lora_rank must be set: an indexer needs it"))?;
    let width = config.size_or(&["index_head_dim"], 128)?;
    if width < latent.rope {
        return Err(config_error(format!("index_head_dim {width} is less than qk_rope_head_dim {}", latent.rope)));
    }
    let heads = config.size_or(&["index_n_heads"], heads)?;
    let top_k = config.size_or(&["index_topk"], 2048)?;
    Ok(IndexerShape { hidden: latent.hidden, q_rank, heads, width, top_k, block: None })
}
