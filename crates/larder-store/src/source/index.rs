//! Which files of a checkpoint folder hold its tensors, by its index.

use std::{
    collections::BTreeMap,
    path::{Component, Path},
};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::read_small,
};

const INDEX_LIMIT: u64 = 100 << 20;
/// The file of a model in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of a model in several.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The map of the index from tensors to files; `None` if the model is in one file.
pub(super) fn weight_map(path: &Path) -> Result<Option<BTreeMap<String, String>>> {
    if path.join(SINGLE).exists() { Ok(None) } else { read_map(path, |file| path.join(file).exists()) }
}

/// The map from tensors to files; `None` without an index. All files of the index must exist.
pub(super) fn read_map(path: &Path, exists: impl Fn(&str) -> bool) -> Result<Option<BTreeMap<String, String>>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index_path = path.join(INDEX);
    let Some(bytes) = read_small(&index_path, INDEX_LIMIT)? else { return Ok(None) };
    let index: Index = parse_json(&index_path, &bytes)?;
    for file in index.weight_map.values() {
        if !is_bare_file_name(file) {
            let what = format!("lists '{file}', which is not a plain file name");
            return Err(StoreError::malformed(&index_path, what));
        }
        if !exists(file) {
            return Err(StoreError::new(
                StoreErrorKind::Missing,
                &index_path,
                format!("lists {file}, which is missing"),
            ));
        }
    }
    Ok(Some(index.weight_map))
}

/// `model.safetensors`, or else the only safetensors file of the folder.
pub(super) fn single_file(path: &Path) -> Result<String> {
    if path.join(SINGLE).exists() {
        return Ok(SINGLE.to_owned());
    }
    let entries = std::fs::read_dir(path).map_err(|e| StoreError::io(path, "listing", e))?;
    let mut names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
    let mut found = names.by_ref().filter(|n| n.ends_with(".safetensors"));
    let missing = |what| StoreError::new(StoreErrorKind::Missing, path, what);
    let name = found.next().ok_or_else(|| missing("has no safetensors file"))?;
    match found.next() {
        Some(_) => Err(missing("has several safetensors files, but no model.safetensors.index.json")),
        None => Ok(name),
    }
}

/// Whether `name` is a file name without folders, so that it cannot lead out of a folder.
pub fn is_bare_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let plain = matches!(components.next(), Some(Component::Normal(first)) if first == name);
    plain && components.next().is_none() && !name.contains(['\\', '\0'])
}

/// The JSON of a file at `path`.
fn parse_json<T: serde::de::DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| not_json(path, &e))
}

/// The error about a file at `path` that is not JSON.
pub(super) fn not_json(path: &Path, error: &serde_json::Error) -> StoreError {
    StoreError::malformed(path, format!("is not valid JSON of its kind: {error}"))
}
