//! The supply of a cache: slots in memory, the reader that fills them, and the layout and checksums of shards.

use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, LayerIdx, SEGMENTS, TaskThreads};
use larder_store::reader::{Reader, Slot};
use larder_store::{DATA_START, ExpertSource, ShardSet, Store, StoreError};

/// What the cache needs to know of the store: where an expert's data are in its shard, and whether read bytes are
/// valid.
pub trait Shards: Send + Sync {
    /// The layout of the experts of `layer`.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// First byte of an expert's data in its shard.
    fn data_start(&self) -> u64;

    /// Number of parts of an expert that can be checked at the same time; at least 1.
    fn check_parts(&self) -> usize {
        1
    }

    /// Where an expert of `layer` is cut into two reads, if its first half can be checked alone.
    fn cut(&self, layer: LayerIdx) -> Option<usize> {
        if self.check_parts() == SEGMENTS { self.layout(layer).cut() } else { None }
    }

    /// The smaller copies of all experts, if there are any. Their shards follow those of the experts, in the same
    /// order.
    fn small(&self) -> Option<&dyn Shards> {
        None
    }

    /// Checks one of the [`check_parts`](Self::check_parts) of an expert that was read, given with all its data, or at
    /// least with those up to the end of the part. If there are two, they are the [segments](ExpertLayout::segments).
    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError>;
}

impl Shards for ShardSet {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        ExpertSource::layout(self, layer)
    }

    fn data_start(&self) -> u64 {
        DATA_START as u64
    }

    fn check_parts(&self) -> usize {
        SEGMENTS
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError> {
        self.check_part(layer, expert, part, data)
    }
}

impl Shards for Arc<Store> {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        ExpertSource::layout(self.as_ref(), layer)
    }

    fn data_start(&self) -> u64 {
        DATA_START as u64
    }

    fn check_parts(&self) -> usize {
        SEGMENTS
    }

    fn small(&self) -> Option<&dyn Shards> {
        self.small_shards().map(|set| set as &dyn Shards)
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError> {
        self.check_part(layer, expert, part, data)
    }
}

/// The memory of a cache, and what fills it.
pub struct SlotSupply {
    /// The slots, each large enough for every expert that is read into it.
    pub memory: Vec<Slot>,
    /// The reader that fills the slots.
    pub reader: Box<dyn Reader>,
    /// Knows the layout of experts and checks their bytes.
    pub shards: Box<dyn Shards>,
    /// The threads that share the checks.
    pub threads: Arc<dyn TaskThreads>,
}
