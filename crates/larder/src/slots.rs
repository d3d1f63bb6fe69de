//! Slots over the shards of a store.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use larder_cache::Cache;
use larder_policy::eviction::{Eviction, Setting};
use larder_store::Store;
use larder_store::reader::{Arena, Files, open_reader};

use crate::print;

/// An empty cache as `setting` says, with one of `policies` for each pool, how its shards are read, and the addresses of
/// its slots.
pub fn cache(
    store: &Arc<Store>,
    setting: &Setting,
    policies: Vec<Box<dyn Eviction>>,
    reader: &str,
) -> Result<(Cache, String, Range<usize>)> {
    let manifest = store.manifest();
    let (total, slot_bytes) = (setting.all_slots(), manifest.experts.data_bytes);
    let (arena, memory) = Arena::new(total, slot_bytes)
        .with_context(|| format!("{total} slots of {} cannot be had", print::bytes(slot_bytes as u64)))?;
    let (paths, bytes) = store.shard_files();
    let files = Arc::new(Files::new(paths.len(), bytes, move |shard| paths[shard].clone())?);
    let (reader, how) = open_reader(reader, &files, &arena)?;
    let cache = Cache::new(&manifest.geometry, setting, policies, memory, reader, Box::new(store.clone()));
    Ok((cache, how, arena.range()))
}
