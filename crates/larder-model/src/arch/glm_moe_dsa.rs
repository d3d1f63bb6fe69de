//! GLM-5: the latent attention and the experts of DeepSeek-V3.2, with indexers whose choice several layers share.
//!
//! ```text
//! x += latent_attention(rms(x))             to the index_topk positions that the layer's indexer scores highest, or to those
//!                                           of the layer before
//! x += mlp(rms(x))                          dense layers, usually the first
//! x += Σ_k weight · expert(y) + shared(y)   the others: y = rms(x); gate of DeepSeek-V3
//! ```

use super::deepseek_family::{Family, FfnDefaults, Indexers, LatentDefaults, build_with};
use super::deepseek_v3::{GateDefaults, parse_gate, with_bias};
use super::deepseek_v32::{UNREAD_KEYS, indexer_shape, interleaved_rope};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::stack::Stack;
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    config.ignore(UNREAD_KEYS);
    let family = Family {
        latent: LatentDefaults { q_rank: Some(2048), nope: 192, value: 256, eps: 1e-5, ..LatentDefaults::COMMON },
        ffn: FfnDefaults { dense_layers: 3, shared_experts: 1, typed: true },
        rope: interleaved_rope,
        gate: |config| parse_gate(config, GateDefaults { groups: 1, keep: 1, scale: 2.5, renorm: true }),
        layer_gate: with_bias,
        temperature: None,
        indexers: |config, basics, shape| {
            let own = own_indexers(config, basics.layers)?;
            if own.first() == Some(&false) {
                return Err(config_error("indexer_types must begin with 'full'"));
            }
            Ok(Some(Indexers { shape: indexer_shape(config, shape, 32)?, interleaved: true, own }))
        },
    };
    build_with(config, weights, family)
}

/// For each layer whether it has an indexer: by `indexer_types`, else by `index_topk_pattern`, else every
/// `index_topk_freq`-th from `index_skip_topk_offset` on, and those before it.
pub fn own_indexers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let (every, offset) =
        (config.count_or(&["index_topk_freq"], 1)?.max(1), config.count_or(&["index_skip_topk_offset"], 2)?);
    let pattern = if config.is_list("index_topk_pattern") {
        config.opt_texts("index_topk_pattern")?
    } else {
        config.opt_text("index_topk_pattern")?.map(|text| text.split("").filter(|c| !c.is_empty()).collect())
    };
    let own: Vec<bool> = match config.opt_texts("indexer_types")?.or(pattern) {
        Some(types) => types.into_iter().map(has_own).collect::<Result<_>>()?,
        None => (0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(every)).collect(),
    };
    if own.len() >= layers {
        Ok(own)
    } else {
        Err(config_error(format!("indexer_types must name each of {layers} layers")))
    }
}

fn has_own(kind: &str) -> Result<bool> {
    match kind {
        "full" | "F" => Ok(true),
        "shared" | "S" => Ok(false),
        other => Err(config_error(format!("an indexer can be 'full' or 'shared', not '{other}'"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn indexers_follow_types_pattern_or_schedule() {
        let own = |config: serde_json::Value, layers: usize| {
            let own = own_indexers(&mut Config::new(&config).unwrap(), layers);
            own.map(|own| own.into_iter().map(|own| if own { 'F' } else { 'S' }).collect::<String>()).ok()
        };
        let found = |config: serde_json::Value| own(config, 6).unwrap();
        assert_eq!(found(json!({})), "FFFFFF");
        assert_eq!(found(json!({"index_topk_freq": 2})), "FFSFSF");
        assert_eq!(found(json!({"index_topk_freq": 3, "index_skip_topk_offset": 1})), "FSSFSS");
        assert_eq!(found(json!({"index_topk_freq": 2, "index_topk_pattern": "FSSFFS"})), "FSSFFS");
        assert_eq!(found(json!({"index_topk_pattern": ["full", "shared", "full", "full", "full", "full"]})), "FSFFFF");
        let types = json!(["full", "full", "shared", "shared", "full", "shared"]);
        assert_eq!(found(json!({"indexer_types": types, "index_topk_pattern": "FFFFFF"})), "FFSSFS");
        assert_eq!(own(json!({"index_topk_pattern": "SF"}), 2).as_deref(), Some("SF"));
        assert_eq!(own(json!({"index_topk_pattern": "FS"}), 3), None);
        assert_eq!(own(json!({"index_topk_pattern": "FX"}), 2), None);
    }
}
