//! Slots for the experts of a store, with a reader that fills them.

use std::sync::Arc;

use anyhow::{Context, Result};
use larder_core::format_bytes;
use larder_policy::eviction::CacheShape;
use larder_store::reader::{Arena, Reader, ReaderSpec, Slot};
use larder_store::{ExpertSource, Store};

use crate::notices::Setting;
use crate::plan::belong_to_layers;

/// Empty slots and their reader.
pub struct Slots {
    /// The slots.
    pub slots: Vec<Slot>,
    /// Reads shards into the slots.
    pub reader: Box<dyn Reader>,
    /// The reader and how it reads, as text.
    pub reader_note: String,
    /// The memory of the slots.
    pub arena: Arena,
}

impl Slots {
    /// Allocates the slots of a cache of this shape, then `pass_through` slots for any expert, and opens the reader.
    /// Their memory, which the plan counts, is touched when they are first used, or ahead of that by
    /// [`Arena::touch_ahead`].
    pub fn new(store: &Arc<Store>, shape: &CacheShape, pass_through: usize, reader: &ReaderSpec) -> Result<Self> {
        Self::of_sizes(store, &slot_sizes(store, shape, pass_through), reader)
    }

    /// Allocates `total` slots, each of which holds any expert of the store, and opens the reader.
    pub(crate) fn for_any_expert(store: &Arc<Store>, total: usize, reader: &ReaderSpec) -> Result<Self> {
        Self::of_sizes(store, &vec![store.manifest().slot_bytes(); total], reader)
    }

    fn of_sizes(store: &Arc<Store>, sizes: &[usize], reader: &ReaderSpec) -> Result<Self> {
        let (arena, slots) = Arena::with_sizes(sizes).with_context(|| {
            format!(
                "cannot allocate {} slots of {} in all; try a smaller {}",
                sizes.len(),
                format_bytes(sizes.iter().map(|bytes| *bytes as u64).sum()),
                Setting::Cache
            )
        })?;
        let files = Arc::new(store.shard_files()?);
        let (reader, reader_note) = reader.open(&files, &arena)?;
        Ok(Slots { slots, reader, reader_note, arena })
    }
}

/// The size of each slot of a cache of this shape, and of each of its pass-through slots.
pub(crate) fn slot_sizes(store: &Store, shape: &CacheShape, pass_through: usize) -> Vec<usize> {
    let mut sizes = if belong_to_layers(shape.scope, shape.scratch) {
        let layers = &store.manifest().geometry.moe_layers;
        layers.iter().flat_map(|layer| std::iter::repeat_n(store.layout(*layer).bytes, shape.slots)).collect()
    } else {
        vec![store.manifest().slot_bytes(); shape.total_slots()]
    };
    sizes.resize(sizes.len() + pass_through, store.manifest().slot_bytes());
    sizes
}
