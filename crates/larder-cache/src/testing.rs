//! A small model for the tests of both caches, whose experts are recognised by their bytes.

use std::path::Path;
use std::sync::Arc;

use larder_core::{CallerThread, ExpertId, ExpertLayout, Geometry, LayerIdx, NumberFormat};
use larder_store::reader::{MemoryReader, Slot};
use larder_store::{StoreError, StoreErrorKind};

use crate::fill::{Shards, SlotSupply};

pub const LAYERS: usize = 3;
pub const EXPERTS: usize = 6;
/// First byte of an expert's data in its shard.
const START: u64 = 4096;

pub fn geometry() -> Geometry {
    Geometry::narrow(LAYERS, 0..LAYERS as u16, EXPERTS, 2)
}

pub fn layout() -> ExpertLayout {
    // Two pages of gate and up, and one of down.
    ExpertLayout::new(32, 32, [NumberFormat::F32; 3], false).unwrap()
}

/// The value of every byte of an expert: its number among all, from 1.
pub fn fill_byte(layer: LayerIdx, expert: ExpertId) -> u8 {
    (layer.index() * EXPERTS + expert.index()) as u8 + 1
}

/// A reader of shards in which every byte of an expert is its [`fill_byte`].
pub fn numbered_reader() -> MemoryReader {
    let shard = |i: usize| [vec![0; START as usize], vec![i as u8 + 1; layout().bytes]].concat();
    MemoryReader::new(Arc::new((0..LAYERS * EXPERTS).map(shard).collect()), 7)
}

/// What the cache needs to know of these shards.
struct NumberedShards(ExpertLayout);

impl NumberedShards {
    fn new() -> Self {
        NumberedShards(layout())
    }
}

/// These shards in `memory`, checked on the caller's thread.
pub fn supply(memory: Vec<Slot>, reader: MemoryReader) -> SlotSupply {
    let (reader, shards) = (Box::new(reader), Box::new(NumberedShards::new()));
    SlotSupply { memory, reader, shards, threads: Arc::new(CallerThread) }
}

impl Shards for NumberedShards {
    fn layout(&self, _: LayerIdx) -> &ExpertLayout {
        &self.0
    }

    fn data_start(&self) -> u64 {
        START
    }

    fn check_parts(&self) -> usize {
        2
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError> {
        if data[self.0.segments()[part].clone()].iter().all(|b| *b == fill_byte(layer, expert)) {
            Ok(())
        } else {
            Err(StoreError::new(StoreErrorKind::Mismatch, Path::new("shard"), "does not match its checksum"))
        }
    }
}
