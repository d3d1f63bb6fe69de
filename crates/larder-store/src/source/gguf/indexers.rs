//! Configs of models with the latent attention of DeepSeek whose positions an indexer chooses.

use serde_json::json;

use super::{
    config::{SIGMOID_SCORES, latent},
    hyperparameters::{Hyperparameters, Keys, keys},
    sliding::listed_layers,
};
use crate::error::Result;

pub(super) fn deepseek32(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = with_indexers(hp)?;
    own.insert("model_type".into(), "deepseek_v32".into());
    Ok(own)
}

pub(super) fn glm_dsa(hp: &Hyperparameters) -> Result<Keys> {
    let mut own = with_indexers(hp)?;
    own.extend(keys(json!({ "model_type": "glm_moe_dsa", "indexer_types": indexer_types(hp)? })));
    Ok(own)
}

/// For each layer whether it has an indexer. Older files of GLM do not list those that have, which are those with its
/// tensors.
pub(super) fn indexer_types(hp: &Hyperparameters) -> Result<Vec<&'static str>> {
    let own_indexers = match listed_layers(hp, "attention.indexer.types")? {
        Some(listed) => listed,
        None => (0..hp.layers()?).map(|l| hp.has(&format!("model.layers.{l}.self_attn.indexer.wk.weight"))).collect(),
    };
    Ok(own_indexers.into_iter().map(|own| if own { "full" } else { "shared" }).collect())
}

/// The keys of latent attention and of indexers.
pub(super) fn with_indexers(hp: &Hyperparameters) -> Result<Keys> {
    hp.scores_are(SIGMOID_SCORES)?;
    let mut own = latent(hp)?;
    own.extend(keys(json!({
        "index_n_heads": hp.uint("attention.indexer.head_count")?,
        "index_head_dim": hp.uint("attention.indexer.key_length")?,
        "index_topk": hp.uint("attention.indexer.top_k")?,
    })));
    Ok(own)
}
