//! The cache of one tier: carries out the ledger's decisions with a reader and slots in memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{CacheScope, ExpertId, ExpertLayout, Geometry, LayerIdx, Residency, WantedExpert};
use larder_policy::eviction::{CacheShape, Eviction};
use larder_store::reader::{ReadCompletion, ReadRequest, Reader, Slot};
use larder_store::{DATA_START, ExpertSource, Store, StoreError};

use crate::chosen::ChosenExperts;
use crate::ledger::{Ledger, SlotIndex, Wave};
use crate::traffic::{BusyTime, Traffic};

/// What the cache needs to know of the store: where an expert's data are in its shard, and whether read bytes are
/// valid.
pub trait Shards: Send {
    /// The layout of the experts of `layer`.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// First byte of an expert's data in its shard.
    fn data_start(&self) -> u64;

    /// Checks an expert's data the first time they are read in a run.
    fn check(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<(), StoreError>;
}

impl Shards for Arc<Store> {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        ExpertSource::layout(self.as_ref(), layer)
    }

    fn data_start(&self) -> u64 {
        DATA_START as u64
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<(), StoreError> {
        self.check_expert(layer, expert, data)
    }
}

/// Why an expert is not available.
#[derive(Debug, thiserror::Error)]
#[error("{layer}, {expert}: {cause}")]
pub struct CacheError {
    /// The layer.
    pub layer: LayerIdx,
    /// The expert.
    pub expert: ExpertId,
    /// The failed read or check.
    #[source]
    pub cause: StoreError,
}

/// The result of a visit; experts are in the order wanted.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Visit {
    /// Experts that were resident.
    pub hits: Vec<usize>,
    /// Experts that were in flight: prefetched and still being read, or being copied.
    pub in_flight: Vec<usize>,
    /// Experts that had to be read.
    pub misses: Vec<usize>,
    /// Row and expert of those that were evicted.
    pub evicted: Vec<(usize, usize)>,
}

impl Visit {
    pub(crate) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }

    fn add(&mut self, wave: &Wave) {
        let kinds =
            [(&mut self.hits, &wave.hits), (&mut self.in_flight, &wave.in_flight), (&mut self.misses, &wave.misses)];
        for (all, new) in kinds {
            all.extend(new.iter().map(|(expert, _)| expert));
        }
        self.evicted.extend_from_slice(&wave.evicted);
    }
}

/// Computes with experts of one layout, each given with its bytes.
pub type ComputeFn<'a> = &'a mut dyn FnMut(&ExpertLayout, &[(ExpertId, &[u8])]);

/// Slots, the ledger over them, and the reader that fills them.
pub struct Cache {
    ledger: Ledger,
    /// The experts of the current visit.
    chosen: ChosenExperts,
    /// The open wave of the current visit.
    wave: Wave,
    /// The result of the last visit.
    visit: Visit,
    /// The memory of each slot; `None` while a slot is with the reader.
    slots: Vec<Option<Slot>>,
    reader: Box<dyn Reader>,
    shards: Box<dyn Shards>,
    /// The decoder layers that have experts.
    layers: Vec<LayerIdx>,
    /// For each decoder layer, its index among those with experts (the MoE row).
    rows: Vec<Option<usize>>,
    experts: usize,
    /// Hinted experts to prefetch: row and expert, likeliest first.
    prefetch_queue: VecDeque<(usize, usize)>,
    demand_bytes: u64,
    prefetch_bytes: u64,
    waited: Duration,
    computed: Duration,
    busy: BusyTime,
}

/// Slots that a cache without scratch slots needs.
pub fn slot_count(geometry: &Geometry, slots: usize, scope: CacheScope) -> usize {
    CacheShape::new(geometry, slots, scope).total_slots()
}

impl Cache {
    /// A cache of this shape, with one of `policies` for each pool, over `memory`, which holds exactly
    /// [`total_slots`](CacheShape::total_slots) slots, each large enough for every expert.
    pub fn new(
        geometry: &Geometry,
        shape: &CacheShape,
        policies: Vec<Box<dyn Eviction>>,
        memory: Vec<Slot>,
        reader: Box<dyn Reader>,
        shards: Box<dyn Shards>,
    ) -> Self {
        assert_eq!(memory.len(), shape.total_slots(), "one memory slot for each slot of the shape");
        assert_eq!(
            (shape.rows, shape.experts),
            (geometry.moe_layers.len(), geometry.experts),
            "shape and geometry agree"
        );
        let mut rows = vec![None; geometry.layers];
        for (row, layer) in geometry.moe_layers.iter().enumerate() {
            rows[layer.index()] = Some(row);
        }
        Cache {
            ledger: Ledger::new(shape, policies),
            chosen: ChosenExperts::default(),
            wave: Wave::default(),
            visit: Visit::default(),
            slots: memory.into_iter().map(Some).collect(),
            reader,
            shards,
            layers: geometry.moe_layers.clone(),
            rows,
            experts: geometry.experts,
            prefetch_queue: VecDeque::new(),
            demand_bytes: 0,
            prefetch_bytes: 0,
            waited: Duration::ZERO,
            computed: Duration::ZERO,
            busy: BusyTime::default(),
        }
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> Traffic {
        let Cache { demand_bytes, prefetch_bytes, waited, computed, .. } = *self;
        Traffic {
            counts: self.ledger.counts(),
            demand_bytes,
            prefetch_bytes,
            waited,
            computed,
            read_busy: self.busy.total(),
            tiers: None,
        }
    }

    /// The result of the last visit.
    pub fn last_visit(&self) -> &Visit {
        &self.visit
    }

    /// The residency of experts, for routing.
    pub fn residency(&self) -> &dyn Residency {
        &self.ledger
    }

    /// The shape that the policies were made for.
    pub fn shape(&self) -> &CacheShape {
        self.ledger.shape()
    }

    /// Replaces the eviction policies, one for each pool.
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.ledger.set_policies(policies);
    }

    /// The MoE row of a layer: its index among those with experts. The caller guarantees that it has experts.
    pub fn row(&self, layer: LayerIdx) -> usize {
        self.rows[layer.index()].expect("the layer has experts")
    }

    /// Slots into which experts of `layer` can be read without an eviction.
    pub fn free_slots(&self, layer: LayerIdx) -> usize {
        self.ledger.free_slots(self.row(layer))
    }

    /// A new sequence begins, unrelated to the one before.
    pub fn new_sequence(&mut self) {
        self.ledger.new_sequence();
    }

    /// The layout of the experts of `layer`.
    pub fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.shards.layout(layer)
    }

    /// A hint: the experts that `layer` will probably want, likeliest first. The first `limit` absent ones are
    /// prefetched
    /// when the SSD would otherwise be idle. A new hint discards prefetches of the previous one that have not begun.
    pub fn hint(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize) {
        let row = self.row(layer);
        let absent = experts.iter().map(|e| (row, e.index())).filter(|(row, e)| self.ledger.is_absent(*row, *e));
        self.prefetch_queue = absent.take(limit).collect();
    }

    /// Hands each of `wanted` (distinct, in order of rank) to `compute` once: the resident ones first and together, the
    /// others as they arrive. Each is read at most once; if not all fit into the slots at once, there are several
    /// waves.
    /// `logits` are the router logits if the layer chose for one token, else empty.
    ///
    /// On an error the cache stays usable: no wanted expert is in flight and no slot is lost.
    pub fn visit(
        &mut self,
        layer: LayerIdx,
        wanted: &[WantedExpert],
        logits: &[f32],
        compute: ComputeFn,
    ) -> Result<(), CacheError> {
        let row = self.row(layer);
        self.chosen.set(wanted);
        let choice = self.chosen.choice(row, logits);
        self.ledger.begin(&choice);
        let mut rest = choice.wanted.to_vec();
        self.ledger.residents_first(row, &mut rest);
        let mut wave = std::mem::take(&mut self.wave);
        self.visit.clear();
        let mut outcome = Ok(());
        while outcome.is_ok() && !rest.is_empty() {
            self.ledger.open(row, &rest, &mut wave);
            if wave.is_empty() {
                self.complete_read(&mut VecDeque::new());
                continue;
            }
            outcome = self.serve_wave(layer, row, &wave, compute);
            self.ledger.close(row, &mut wave);
            self.visit.add(&wave);
            rest.retain(|e| !wave.covers(*e));
        }
        self.wave = wave;
        outcome
    }

    fn serve_wave(&mut self, layer: LayerIdx, row: usize, wave: &Wave, compute: ComputeFn) -> Result<(), CacheError> {
        let mut waiting: VecDeque<ReadRequest> = wave.misses.iter().map(|(e, at)| self.read(row, *e, *at)).collect();
        self.demand_bytes += waiting.iter().map(|r| r.len as u64).sum::<u64>();
        self.submit(&mut waiting);
        let mut outstanding = wave.misses.len() + wave.in_flight.len();
        self.prefetch_if_idle(wave.misses.len());
        self.compute_group(layer, &wave.hits, compute);
        let mut first_error = None;
        let mut demand_reads = wave.misses.len();
        while outstanding > 0 {
            let completed = self.complete_read(&mut waiting);
            if completed.row != row || !wave.covers(completed.expert) {
                continue;
            }
            outstanding -= 1;
            demand_reads -= usize::from(wave.misses.iter().any(|(e, _)| *e == completed.expert));
            self.prefetch_if_idle(demand_reads);
            match completed.result {
                Ok(at) if first_error.is_none() => self.compute_group(layer, &[(completed.expert, at)], compute),
                Ok(_) => {}
                Err(cause) => {
                    let expert = ExpertId(completed.expert as u16);
                    first_error.get_or_insert(CacheError { layer, expert, cause });
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// A read of an expert into the slot that the ledger assigned to it.
    fn read(&mut self, row: usize, expert: usize, at: SlotIndex) -> ReadRequest {
        let (len, offset) = (self.shards.layout(self.layers[row]).bytes, self.shards.data_start());
        let slot = self.slots[at].take().expect("an assigned slot is with the cache");
        let shard = row * self.experts + expert;
        ReadRequest { shard, offset, len, slot, tag: shard as u64 }
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        self.reader.submit(reads);
        self.busy.set(self.reader.in_flight() > 0);
    }

    /// Prefetches hinted experts while there are no demand reads.
    fn prefetch_if_idle(&mut self, demand_reads: usize) {
        while demand_reads == 0
            && self.reader.in_flight() < self.reader.capacity()
            && let Some((row, expert)) = self.prefetch_queue.pop_front()
        {
            let Some(at) = self.ledger.prefetch(row, expert) else { continue };
            let read = self.read(row, expert, at);
            self.prefetch_bytes += read.len as u64;
            self.submit(&mut VecDeque::from([read]));
        }
    }

    /// Waits for the next read to complete, keeping the reader's queue full. The caller guarantees a read in flight.
    fn complete_read(&mut self, waiting: &mut VecDeque<ReadRequest>) -> CompletedRead {
        if !waiting.is_empty() {
            self.submit(waiting);
        }
        let start = Instant::now();
        let ReadCompletion { slot, tag, result } = self.reader.wait().expect("a read is in flight");
        self.waited += start.elapsed();
        self.busy.set(self.reader.in_flight() > 0);
        let (row, expert) = (tag as usize / self.experts, tag as usize % self.experts);
        let at = self.ledger.in_flight(row, expert).expect("the ledger knows every read in flight");
        self.slots[at] = Some(slot);
        let result = result.and_then(|()| self.check(row, expert, at));
        match &result {
            Ok(()) => self.ledger.arrived(row, expert),
            Err(_) => self.ledger.failed(row, expert),
        }
        CompletedRead { row, expert, result: result.map(|()| at) }
    }

    fn check(&self, row: usize, expert: usize, at: SlotIndex) -> Result<(), StoreError> {
        let layer = self.layers[row];
        self.shards.check(layer, ExpertId(expert as u16), self.data(layer, at))
    }

    fn data(&self, layer: LayerIdx, at: SlotIndex) -> &[u8] {
        let slot = self.slots[at].as_ref().expect("the slot of a resident expert is with the cache");
        &slot[..self.shards.layout(layer).bytes]
    }

    fn compute_group(&mut self, layer: LayerIdx, experts: &[(usize, SlotIndex)], compute: ComputeFn) {
        if experts.is_empty() {
            return;
        }
        let start = Instant::now();
        let group: Vec<_> = experts.iter().map(|(e, at)| (ExpertId(*e as u16), self.data(layer, *at))).collect();
        compute(self.shards.layout(layer), &group);
        self.computed += start.elapsed();
    }
}

/// A completed read: the expert, and the slot with its bytes.
struct CompletedRead {
    row: usize,
    expert: usize,
    result: Result<SlotIndex, StoreError>,
}

#[cfg(test)]
mod tests;
