//! Values that differ by layer in a model, from lists of the metadata or from the tensors.

use super::hyperparameters::Hyperparameters;
use crate::error::Result;

/// For each layer, whether it has a sliding window: by the metadata, else all but the last of every `every`.
pub(super) fn sliding_layers(hp: &Hyperparameters, every: u64) -> Result<Vec<bool>> {
    match listed_sliding_layers(hp)? {
        Some(given) => Ok(given),
        None => Ok((0..hp.layers()?).map(|layer| !(layer + 1).is_multiple_of(every)).collect()),
    }
}

/// As [`sliding_layers`], where the metadata list them.
pub(super) fn listed_sliding_layers(hp: &Hyperparameters) -> Result<Option<Vec<bool>>> {
    listed_layers(hp, "attention.sliding_window_pattern")
}

/// The flag of each layer in a list of the metadata.
pub(super) fn listed_layers(hp: &Hyperparameters, key: &str) -> Result<Option<Vec<bool>>> {
    let (layers, key) = (hp.layers()? as usize, hp.key(key)?);
    match hp.metadata.flags_or_numbers(&key)? {
        Some(given) if given.len() < layers => {
            Err(hp.unsupported(format!("has {} entries in '{key}' for {layers} layers", given.len())))
        }
        Some(given) => Ok(Some(given.into_iter().take(layers).collect())),
        None => Ok(None),
    }
}

/// The config's `layer_types` of layers with these sliding windows.
pub(super) fn layer_types(sliding: &[bool]) -> Vec<&'static str> {
    sliding.iter().map(|sliding| if *sliding { "sliding_attention" } else { "full_attention" }).collect()
}

/// A number for each layer: those of a list, or one for all.
pub(super) fn counts(hp: &Hyperparameters, key: &str, default: u64) -> Result<Vec<u64>> {
    let (layers, path) = (hp.layers()? as usize, hp.key(key)?);
    let Ok(Some(given)) = hp.metadata.ints(&path) else { return Ok(vec![hp.uint_or(key, default)?; layers]) };
    let counts: Option<Vec<u64>> = given.iter().take(layers).map(|count| u64::try_from(*count).ok()).collect();
    hp.metadata.need(&format!("{path} for {layers} layers"), counts.filter(|counts| counts.len() == layers))
}

/// For each layer, its heads of keys; none in layers without attention.
pub(super) fn key_heads(hp: &Hyperparameters) -> Result<Vec<i64>> {
    let key = hp.key("attention.head_count_kv")?;
    let heads = hp.metadata.need(&key, hp.metadata.ints(&key)?)?;
    Ok(heads.iter().take(hp.layers()? as usize).copied().collect())
}

/// Whether any layer has this tensor.
pub(super) fn any_layer(hp: &Hyperparameters, tensor: &str) -> Result<bool> {
    Ok((0..hp.layers()?).any(|layer| hp.has(&format!("model.layers.{layer}.{tensor}"))))
}
