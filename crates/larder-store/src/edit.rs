//! Deliberate changes of a finished store's manifest.

use std::path::Path;

use larder_core::{Blueprint, Geometry};
use serde_json::Value;

use crate::{
    atomic_file::{sync_folder, write_atomically},
    convert::lock,
    error::{Result, StoreError, StoreErrorKind},
    identity::identity,
    manifest::{FORMAT_VERSION, MANIFEST_FILE, Manifest},
    provenance::is_made_of,
    sidecars::reseal,
    source::Source,
    store::Store,
};

/// Replaces the config of the store at `path` by `config`, which describes the model of `blueprint`.
///
/// Refused if it describes other tensors than the store holds. Sidecars that were made with the config before no longer belong
/// to the store.
pub fn set_config(path: &Path, config: Value, blueprint: &Blueprint) -> Result<()> {
    let _lock = lock(path)?;
    let store = open_current(path)?;
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

/// Records in the store at `path` that it was made of `source`, after comparing resident weights and some experts of each
/// layer. Returns whether it was not recorded before.
pub fn record_source(path: &Path, source: &dyn Source, blueprint: &Blueprint) -> Result<bool> {
    let _lock = lock(path)?;
    let store = open_current(path)?;
    let found = identity(source, blueprint)?;
    let same = match &store.manifest().source.identity {
        Some(recorded) => *recorded == found,
        None => is_made_of(&store, source, blueprint)?,
    };
    if !same {
        let what = format!("was not made of {}", source.path().display());
        return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
    }
    if store.manifest().source.identity.is_some() {
        return Ok(false);
    }
    let mut manifest = store.manifest().clone();
    manifest.source.identity = Some(found);
    manifest.source.files = source.files();
    let bytes = manifest.to_bytes();
    // The sidecars belong to the store as before. They come first: done again after an interruption, this finds them sealed.
    reseal(path, store.hash(), &Manifest::hash_of(&bytes))?;
    write_manifest(path, &bytes)?;
    Ok(true)
}

/// Opens a store of the current format, of which shards may be missing.
fn open_current(path: &Path) -> Result<Store> {
    let store = Store::open_partial(path)?;
    match store.manifest().format == FORMAT_VERSION {
        true => Ok(store),
        false => {
            let what = format!("has store format {}; run `larder store upgrade` first", store.manifest().format);
            Err(StoreError::new(StoreErrorKind::Unsupported, path, what))
        }
    }
}

fn write_manifest(store: &Path, bytes: &[u8]) -> Result<()> {
    write_atomically(&store.join(MANIFEST_FILE), bytes)?;
    sync_folder(store)
}
