//! Loads all experts of a model into memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use larder_core::{ExpertId, Geometry, LayerIdx, RowOrder};
use larder_model::{AllResident, ComputeContext};
use larder_store::reader::{Arena, ReadRequest, Reader, ReaderSpec, Slot, TouchPace};
use larder_store::{DATA_START, ExpertSource, Result as StoreResult, Store};
use parking_lot::Mutex;

use crate::notices::{Notices, PreloadRates, Setting};

/// Threads that assemble experts: some wait for the SSD while others convert and check.
const THREADS: usize = 4;

/// Bit of a tag: the read is of another copy.
const COPY: u64 = 1 << 63;

/// The read of another copy of the expert that was read into `slot`.
fn again(slot: Slot, tag: u64, len: usize) -> ReadRequest {
    ReadRequest { shard: tag as usize, offset: DATA_START as u64, len, slot, tag: tag | COPY }
}

/// Loads from a store's shards, at the rate of the SSD or of the system's clearing of memory, whichever is lower.
pub fn from_store(
    store: &Arc<Store>,
    compute: &Arc<ComputeContext>,
    notices: &Notices,
) -> Result<(AllResident<Slot>, PreloadRates)> {
    let geometry = &store.manifest().geometry;
    let (arena, slots) = arena(store.as_ref(), geometry)?;
    let files = Arc::new(store.shard_files()?);
    let (mut reader, _) = ReaderSpec::AUTO.open_paced(&files, &arena)?;
    arena.touch_ahead(TouchPace::AheadOfReads);
    let start = Instant::now();
    let work = LoadProgress::begin(notices, arena.bytes() as u64);
    let expert = |shard: usize| {
        let layer = geometry.moe_layers[shard / geometry.experts];
        (layer, ExpertId((shard % geometry.experts) as u16), store.layout(layer))
    };
    let read = |(shard, slot)| ReadRequest {
        shard,
        offset: DATA_START as u64,
        len: expert(shard).2.bytes,
        slot,
        tag: shard as u64,
    };
    let mut waiting: VecDeque<ReadRequest> = slots.into_iter().enumerate().map(read).collect();
    let mut done = Vec::with_capacity(waiting.len());
    loop {
        reader.submit(&mut waiting);
        let Some(mut read) = reader.wait() else { break };
        let (layer, id, layout) = expert((read.tag & !COPY) as usize);
        arena.reads_reached(read.slot.index());
        read.result.with_context(|| format!("{layer}, {id}"))?;
        if let Err(wrong) = store.check_expert(layer, id, &read.slot[..layout.bytes]) {
            // From another copy, once.
            if read.tag & COPY != 0 || reader.read_copy(again(read.slot, read.tag, layout.bytes), &wrong).is_err() {
                return Err(wrong.into());
            }
            continue;
        }
        layout.rearrange(&mut read.slot);
        work.0.advance(layout.bytes as u64);
        done.push(read.slot);
    }
    drop(work);
    let (bytes, time, clearing) = (arena.bytes() as u64, start.elapsed(), arena.touched().rate());
    let rates = PreloadRates { bytes, time, ssd: reader.mean_rate(), clearing };
    Ok((resident(store.as_ref(), geometry, done, compute), rates))
}

/// Loads from a checkpoint or a GGUF file.
pub fn from_source(
    experts: &dyn ExpertSource,
    geometry: &Geometry,
    compute: &Arc<ComputeContext>,
    notices: &Notices,
) -> Result<AllResident<Slot>> {
    let (arena, slots) = arena(experts, geometry)?;
    let work = LoadProgress::begin(notices, arena.bytes() as u64);
    let rest = Mutex::new(slots.into_iter());
    let worker = || -> StoreResult<Vec<Slot>> {
        let mut done = Vec::new();
        loop {
            let next = rest.lock().next();
            let Some(mut slot) = next else { return Ok(done) };
            let layer = geometry.moe_layers[slot.index() / geometry.experts];
            let layout = experts.layout(layer);
            let id = ExpertId((slot.index() % geometry.experts) as u16);
            experts.read_expert(layer, id, &mut slot[..layout.bytes])?;
            layout.rearrange(&mut slot);
            work.0.advance(layout.bytes as u64);
            done.push(slot);
        }
    };
    let done = std::thread::scope(|scope| -> StoreResult<Vec<Slot>> {
        let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(worker)).collect();
        let mut done = Vec::new();
        for worker in workers {
            done.extend(worker.join().expect("no loading thread panics")?);
        }
        Ok(done)
    })?;
    drop(work);
    Ok(resident(experts, geometry, done, compute))
}

/// A slot for every expert, in order of layers and experts.
fn arena(experts: &dyn ExpertSource, geometry: &Geometry) -> Result<(Arena, Vec<Slot>)> {
    let of_layer = |layer: &LayerIdx| std::iter::repeat_n(experts.layout(*layer).bytes, geometry.experts);
    let sizes: Vec<usize> = geometry.moe_layers.iter().flat_map(of_layer).collect();
    Arena::with_sizes(&sizes)
        .with_context(|| format!("not enough memory for all experts; set {} lower", Setting::Cache))
}

/// The progress of loading, which ends when this is dropped.
struct LoadProgress<'a>(&'a Notices);

impl<'a> LoadProgress<'a> {
    fn begin(notices: &'a Notices, bytes: u64) -> Self {
        notices.begin("loading experts", bytes, 0);
        LoadProgress(notices)
    }
}

impl Drop for LoadProgress<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn resident(
    experts: &dyn ExpertSource,
    geometry: &Geometry,
    mut slots: Vec<Slot>,
    compute: &Arc<ComputeContext>,
) -> AllResident<Slot> {
    slots.sort_unstable_by_key(Slot::index);
    let mut slots = slots.into_iter();
    let mut all = AllResident::new(geometry.layers, compute.clone());
    for layer in &geometry.moe_layers {
        let layout = experts.layout(*layer).clone().in_order(RowOrder::Rows8);
        all.set(*layer, layout, slots.by_ref().take(geometry.experts).collect());
    }
    all
}
