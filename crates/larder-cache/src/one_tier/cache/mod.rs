//! The cache of one tier: carries out the ledger's decisions with a reader and slots in memory.

use std::time::{Duration, Instant};

use larder_core::{CacheScope, ExpertId, ExpertKey, ExpertLayout, Geometry, LayerIdx, MoeRow, Residency, WantedExpert};
use larder_policy::eviction::{CacheShape, Eviction};
use larder_store::StoreError;
use larder_store::reader::{Reader, Slot};

use crate::expert_cache::ExpertCache;
use crate::fill::{CompletedRead, Shards, SlotFiller};
use crate::one_tier::ledger::{Ledger, SlotIndex, Wave};
use crate::traffic::Traffic;
use crate::visit::{ChosenExperts, Visit};

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
    filler: SlotFiller,
    waited: Duration,
    computed: Duration,
}

/// Slots that a cache without scratch slots needs.
pub fn slot_count(geometry: &Geometry, slots: usize, scope: CacheScope) -> usize {
    CacheShape::new(geometry, slots, scope).total_slots()
}

impl Cache {
    /// A cache of this shape, with one of `policies` for each pool, over `memory`, which holds exactly
    /// [`total_slots`](CacheShape::total_slots) slots, each large enough for every expert that may be in it:
    /// pool by pool, then the scratch slots.
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
        Cache {
            ledger: Ledger::new(shape, policies),
            chosen: ChosenExperts::default(),
            wave: Wave::default(),
            visit: Visit::default(),
            filler: SlotFiller::new(geometry, memory, reader, shards),
            waited: Duration::ZERO,
            computed: Duration::ZERO,
        }
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            counts: self.ledger.counts(),
            demand_bytes: self.filler.demand_bytes,
            prefetch_bytes: self.filler.prefetch_bytes,
            waited: self.waited,
            computed: self.computed,
            read_busy: self.filler.read_busy(),
            tiers: None,
        }
    }

    /// Slots into which experts of `layer` can be read without an eviction.
    pub fn free_slots(&self, layer: LayerIdx) -> usize {
        self.ledger.free_slots(self.row(layer))
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
                self.complete_read();
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

    fn serve_wave(&mut self, layer: LayerIdx, row: MoeRow, wave: &Wave, compute: ComputeFn) -> Result<(), CacheError> {
        wave.misses.iter().for_each(|(expert, at)| self.filler.read(row.expert(*expert), *at));
        self.filler.submit();
        self.prefetch_if_idle();
        self.compute_group(row, &wave.hits, compute);
        let mut outstanding = wave.misses.len() + wave.in_flight.len();
        let mut first_error = None;
        while outstanding > 0 {
            let completed = self.complete_read();
            let ExpertKey { row: of, expert } = completed.expert;
            if of != row || !wave.covers(expert.index()) {
                continue;
            }
            outstanding -= 1;
            self.prefetch_if_idle();
            match completed.result {
                Ok(at) if first_error.is_none() => self.compute_group(row, &[(expert.index(), at)], compute),
                Ok(_) => {}
                Err(cause) => {
                    first_error.get_or_insert(CacheError { layer, expert, cause });
                }
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Prefetches hinted experts while there are no demand reads.
    fn prefetch_if_idle(&mut self) {
        while let Some(expert) = self.filler.next_prefetch() {
            if let Some(at) = self.ledger.prefetch(expert) {
                self.filler.prefetch(expert, at);
            }
        }
    }

    /// Waits for the next read to complete, and tells the ledger. The caller guarantees a read in flight.
    fn complete_read(&mut self) -> CompletedRead {
        let completed = self.filler.complete(&mut self.waited).expect("a read is in flight");
        match &completed.result {
            Ok(_) => self.ledger.arrived(completed.expert),
            Err(_) => self.ledger.failed(completed.expert),
        }
        completed
    }

    fn compute_group(&mut self, row: MoeRow, experts: &[(usize, SlotIndex)], compute: ComputeFn) {
        if experts.is_empty() {
            return;
        }
        let start = Instant::now();
        let group: Vec<_> = experts.iter().map(|(e, at)| (ExpertId(*e as u16), self.filler.data(row, *at))).collect();
        compute(self.filler.layout_of_row(row), &group);
        self.computed += start.elapsed();
    }
}

impl ExpertCache for Cache {
    fn last_visit(&self) -> &Visit {
        &self.visit
    }

    fn residency(&self) -> &dyn Residency {
        &self.ledger
    }

    fn policy_shape(&self) -> CacheShape {
        *self.ledger.shape()
    }

    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.ledger.set_policies(policies);
    }

    fn new_sequence(&mut self) {
        self.ledger.new_sequence();
    }

    fn row(&self, layer: LayerIdx) -> MoeRow {
        self.filler.row(layer)
    }

    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.filler.layout(layer)
    }

    fn hint(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize) {
        let row = self.row(layer);
        let absent = experts.iter().map(|e| row.key(*e)).filter(|e| self.ledger.is_absent(*e));
        let absent = absent.take(limit).collect();
        self.filler.set_prefetch_queue(absent);
    }
}

#[cfg(test)]
mod tests;
