//! Slots over the shards of a store.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use larder_store::Store;
use larder_store::reader::{Arena, Reader, ShardFiles, Slot, open_reader};

use crate::print;

/// Empty slots, and what fills them.
pub struct Slots {
    /// Each large enough for every expert.
    pub slots: Vec<Slot>,
    /// Reads shards into them.
    pub reader: Box<dyn Reader>,
    /// How, in words.
    pub reader_note: String,
    /// Their addresses.
    pub addresses: Range<usize>,
}

impl Slots {
    /// So many.
    pub fn new(store: &Arc<Store>, total: usize, reader: &str) -> Result<Self> {
        let slot_bytes = store.manifest().experts.data_bytes;
        let (arena, slots) = Arena::new(total, slot_bytes)
            .with_context(|| format!("{total} slots of {} cannot be had", print::bytes(slot_bytes as u64)))?;
        let (paths, bytes) = store.shard_files();
        let files = Arc::new(ShardFiles::new(paths.len(), bytes, move |shard| paths[shard].clone())?);
        let (reader, reader_note) = open_reader(reader, &files, &arena)?;
        Ok(Slots { slots, reader, reader_note, addresses: arena.range() })
    }
}
