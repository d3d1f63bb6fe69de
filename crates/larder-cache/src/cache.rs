//! The ledger's decisions carried out: reads submitted, slots filled, experts handed to whoever computes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{ExpertId, ExpertLayout, Geometry, LayerIdx};
use larder_policy::eviction::Policy;
use larder_store::reader::{Done, Read, Reader, Slot};
use larder_store::{DATA_START, Experts, Store, StoreError};

use crate::ledger::{Counts, Ledger, Scope, SlotIndex, Wave};

/// What the cache needs to know of the store: where experts are and whether what was read is right.
pub trait Shards: Send {
    /// How the experts of `layer` are laid out.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// First byte of an expert's data in its shard.
    fn data_start(&self) -> u64;

    /// Checks an expert's data the first time they are read in a run.
    fn check(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<(), StoreError>;
}

impl Shards for Arc<Store> {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        Experts::layout(self.as_ref(), layer)
    }

    fn data_start(&self) -> u64 {
        DATA_START as u64
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<(), StoreError> {
        self.check_expert(layer, expert, data)
    }
}

/// Why an expert could not be had.
#[derive(Debug, thiserror::Error)]
#[error("{layer}, {expert}: {cause}")]
pub struct CacheError {
    /// Which layer.
    pub layer: LayerIdx,
    /// Which expert.
    pub expert: ExpertId,
    /// What the store said.
    pub cause: StoreError,
}

/// What passed through the cache so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// What the ledger counted.
    pub counts: Counts,
    /// Bytes asked of the reader.
    pub bytes: u64,
    /// Time in which nothing could be computed because nothing had arrived.
    pub waited: Duration,
    /// Time spent computing experts.
    pub computed: Duration,
}

impl std::ops::Sub for Traffic {
    type Output = Traffic;

    /// What passed between two looks.
    fn sub(self, before: Traffic) -> Traffic {
        let (now, then) = (self.counts, before.counts);
        let counts = Counts {
            hits: now.hits - then.hits,
            misses: now.misses - then.misses,
            evictions: now.evictions - then.evictions,
            rereads: now.rereads - then.rereads,
        };
        Traffic {
            counts,
            bytes: self.bytes - before.bytes,
            waited: self.waited - before.waited,
            computed: self.computed - before.computed,
        }
    }
}

/// Slots, the ledger over them, and the reader that fills them.
pub struct Cache {
    ledger: Ledger,
    /// `None` while a slot is with the reader.
    slots: Vec<Option<Slot>>,
    reader: Box<dyn Reader>,
    shards: Box<dyn Shards>,
    /// Position of each decoder layer among those with experts.
    rows: Vec<Option<usize>>,
    experts: usize,
    bytes: u64,
    waited: Duration,
    computed: Duration,
}

/// How many slots a cache needs.
pub fn slot_count(geometry: &Geometry, slots: usize, scope: Scope) -> usize {
    match scope {
        Scope::Layer => geometry.moe_layers.len() * slots,
        Scope::Global => slots,
    }
}

impl Cache {
    /// A cache of `slots` per layer or, for [`Scope::Global`], in all, over `memory`, which holds exactly
    /// [`slot_count`] slots, each large enough for every expert.
    pub fn new(
        geometry: &Geometry,
        slots: usize,
        scope: Scope,
        policy: &Policy,
        memory: Vec<Slot>,
        reader: Box<dyn Reader>,
        shards: Box<dyn Shards>,
    ) -> Self {
        assert_eq!(memory.len(), slot_count(geometry, slots, scope), "one piece of memory per slot");
        let mut rows = vec![None; geometry.layers];
        for (row, layer) in geometry.moe_layers.iter().enumerate() {
            rows[layer.index()] = Some(row);
        }
        Cache {
            ledger: Ledger::new(geometry.moe_layers.len(), geometry.experts, slots, scope, policy),
            slots: memory.into_iter().map(Some).collect(),
            reader,
            shards,
            rows,
            experts: geometry.experts,
            bytes: 0,
            waited: Duration::ZERO,
            computed: Duration::ZERO,
        }
    }

    /// What passed through so far.
    pub fn traffic(&self) -> Traffic {
        let Cache { bytes, waited, computed, .. } = *self;
        Traffic { counts: self.ledger.counts(), bytes, waited, computed }
    }

    /// Hands each of `wanted` (distinct, in order of rank) to `compute` once, those that are in memory first and the
    /// others as they arrive. As many as fit are in memory together; each is read at most once.
    ///
    /// On an error the cache stays usable: nothing is in flight and no slot is lost.
    pub fn visit(
        &mut self,
        layer: LayerIdx,
        wanted: &[ExpertId],
        compute: &mut dyn FnMut(ExpertId, &ExpertLayout, &[u8]),
    ) -> Result<(), CacheError> {
        let row = self.rows[layer.index()].expect("only layers with experts are visited");
        let mut rest = self.in_order(row, wanted);
        while !rest.is_empty() {
            let wave = self.ledger.open(row, &rest);
            let outcome = self.serve(layer, row, &wave, compute);
            self.ledger.close(row, &wave);
            outcome?;
            rest.drain(..wave.len());
        }
        Ok(())
    }

    /// If not all fit together, those that are there go first, before others take their slots.
    fn in_order(&self, row: usize, wanted: &[ExpertId]) -> Vec<usize> {
        let mut order: Vec<usize> = wanted.iter().map(|e| e.index()).collect();
        if order.len() > self.ledger.capacity() {
            order.sort_by_key(|e| !self.ledger.is_resident(row, *e));
        }
        order
    }

    fn serve(
        &mut self,
        layer: LayerIdx,
        row: usize,
        wave: &Wave,
        compute: &mut dyn FnMut(ExpertId, &ExpertLayout, &[u8]),
    ) -> Result<(), CacheError> {
        let mut waiting = self.reads(layer, row, wave);
        self.reader.submit(&mut waiting);
        for (expert, slot) in &wave.hits {
            self.hand_over(layer, *expert, *slot, compute);
        }
        let mut first_error = None;
        while let Some(Done { slot, tag, result }) = self.next_done(&mut waiting) {
            let (expert, at) = wave.misses[tag as usize];
            self.slots[at] = Some(slot);
            match result.and_then(|()| self.check(layer, expert, at)) {
                Ok(()) => {
                    self.ledger.arrived(row, expert);
                    if first_error.is_none() {
                        self.hand_over(layer, expert, at, compute);
                    }
                }
                Err(cause) => {
                    self.ledger.failed(row, expert);
                    first_error.get_or_insert(CacheError { layer, expert: ExpertId(expert as u16), cause });
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn reads(&mut self, layer: LayerIdx, row: usize, wave: &Wave) -> VecDeque<Read> {
        let (len, offset) = (self.shards.layout(layer).bytes, self.shards.data_start());
        self.bytes += (len * wave.misses.len()) as u64;
        let mut reads = VecDeque::with_capacity(wave.misses.len());
        for (tag, (expert, at)) in wave.misses.iter().enumerate() {
            let slot = self.slots[*at].take().expect("a slot given out for a miss is here");
            reads.push_back(Read { shard: row * self.experts + expert, offset, len, slot, tag: tag as u64 });
        }
        reads
    }

    /// The next completion, keeping the reader's queue full.
    fn next_done(&mut self, waiting: &mut VecDeque<Read>) -> Option<Done> {
        if !waiting.is_empty() {
            self.reader.submit(waiting);
        }
        let start = Instant::now();
        let done = self.reader.wait();
        self.waited += start.elapsed();
        done
    }

    fn check(&self, layer: LayerIdx, expert: usize, at: SlotIndex) -> Result<(), StoreError> {
        let data = self.data(layer, at);
        self.shards.check(layer, ExpertId(expert as u16), data)
    }

    fn data(&self, layer: LayerIdx, at: SlotIndex) -> &[u8] {
        let slot = self.slots[at].as_ref().expect("the slot of an expert in memory is here");
        &slot[..self.shards.layout(layer).bytes]
    }

    fn hand_over(
        &mut self,
        layer: LayerIdx,
        expert: usize,
        at: SlotIndex,
        compute: &mut dyn FnMut(ExpertId, &ExpertLayout, &[u8]),
    ) {
        let start = Instant::now();
        compute(ExpertId(expert as u16), self.shards.layout(layer), self.data(layer, at));
        self.computed += start.elapsed();
    }
}

#[cfg(test)]
mod tests;
