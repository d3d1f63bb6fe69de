//! Deliberate changes of a finished store's manifest.

use std::path::Path;

use larder_core::{Blueprint, Geometry};
use serde_json::Value;

use crate::{
    convert::lock,
    error::{Result, StoreError, StoreErrorKind},
    files::atomic_file::{sync_folder, write_atomically},
    manifest::{MANIFEST_FILE, Manifest},
    source::Source,
    store::Store,
};

/// Replaces the config of the store at `path` by `config`, which describes the model of `blueprint`.
///
/// Refused if it describes other tensors than the store holds. Sidecars that were made with the config before no longer
/// belong to the store.
pub fn set_config(path: &Path, config: Value, blueprint: &Blueprint) -> Result<()> {
    let _lock = lock(path)?;
    let store = Store::open_partial(path)?;
    let (before, now) = (&store.manifest().geometry, &blueprint.geometry);
    // How many experts a token uses is the only size on which no tensor depends.
    if (Geometry { top_k: before.top_k, ..now.clone() }) != *before
        || store.manifest().model_type != blueprint.model_type
    {
        let what =
            format!("holds a {} with {before:?}; the change would describe {now:?}", store.manifest().model_type);
        return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
    }
    store.check_tensors(blueprint)?;
    if let Some(name) = store.names().into_iter().find(|name| blueprint.resident.iter().all(|spec| spec.name != *name))
    {
        let what = format!("holds the tensor '{name}', which the change would leave unused");
        return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
    }
    let manifest = Manifest { config, geometry: blueprint.geometry.clone(), ..store.manifest().clone() };
    write_manifest(path, &manifest.to_bytes())
}

fn write_manifest(store: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically(&store.join(MANIFEST_FILE), bytes)?;
    sync_folder(store)
}
