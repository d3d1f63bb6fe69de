//! Slots for the experts of a store, with a reader that fills them.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};
use larder_core::format_bytes;
use larder_store::Store;
use larder_store::reader::{Arena, Reader, ReaderSpec, Slot};

use crate::options::Setting;

/// Empty slots and their reader.
pub struct Slots {
    /// The slots; each can hold any expert of the store.
    pub slots: Vec<Slot>,
    /// Reads shards into the slots.
    pub reader: Box<dyn Reader>,
    /// The reader and how it reads, as text.
    pub reader_note: String,
    /// Address range of the slots.
    pub addresses: Range<usize>,
}

impl Slots {
    /// Allocates `total` slots and opens the reader.
    pub fn new(store: &Arc<Store>, total: usize, reader: &ReaderSpec) -> Result<Self> {
        let slot_bytes = store.manifest().slot_bytes();
        let (arena, slots) = Arena::new(total, slot_bytes).with_context(|| {
            format!(
                "cannot allocate {total} slots of {}; try a smaller {} or {}",
                format_bytes(slot_bytes as u64),
                Setting::CacheExperts,
                Setting::CacheMem
            )
        })?;
        let files = Arc::new(store.shard_files()?);
        let (reader, reader_note) = reader.open(&files, &arena)?;
        Ok(Slots { slots, reader, reader_note, addresses: arena.range() })
    }
}
