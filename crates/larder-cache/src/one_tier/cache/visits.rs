//! Visits of the cache: as usual, of smaller copies, and without a trace.

use std::collections::VecDeque;

use larder_core::{ExpertKey, LayerIdx, WantedExpert};

use super::layer_visit::LayerVisit;
use super::{Cache, CacheError, ComputeFn};
use crate::expert_cache::ExpertCache;

impl Cache {
    /// Hands each of `wanted` (distinct, in order of last use) to `compute` once, whole or in both stages: the resident
    /// ones first, the others as they arrive. Each is read at most once, however few slots there are. `logits` are the
    /// router logits if the layer chose for one token, else empty. `meanwhile` is called when all that is there has
    /// been computed and reads are under way, once at most.
    ///
    /// On an error the cache stays usable: no wanted expert is in flight and no slot is lost.
    pub fn visit(
        &mut self,
        layer: LayerIdx,
        wanted: &[WantedExpert],
        logits: &[f32],
        compute: ComputeFn,
        meanwhile: &dyn Fn(),
    ) -> Result<(), CacheError> {
        let row = self.row(layer);
        self.settle_hot();
        self.chosen.set(wanted);
        let choice = self.chosen.choice(row, logits);
        self.ledger.begin(&choice);
        let mut assignment = std::mem::take(&mut self.assignment);
        self.ledger.open(row, choice.wanted, &mut assignment);
        self.ahead.retain(|(expert, _)| expert.row != row);
        let small = self.filler.small_row(layer);
        let is_wanted = |expert: ExpertKey| expert.row == row && assignment.misses(expert.expert);
        let unwanted = self.pass_through.discard(|expert| Some(expert.row) == small || is_wanted(expert));
        self.reads_ahead.unused += unwanted as u64;
        let outcome = LayerVisit::new(self, layer, row, &assignment).serve(compute, meanwhile);
        self.ledger.close(row, &mut assignment);
        self.visit.set(&assignment);
        self.visit.evicted.append(&mut self.resized.evicted);
        self.assignment = assignment;
        outcome
    }

    /// Hands the smaller copy of each of `wanted` to `compute`, as [`visit`](Self::visit) does with experts. They pass
    /// through: none becomes resident. The caller guarantees that the cache [has](Self::has_small) such copies.
    pub fn visit_small(
        &mut self,
        layer: LayerIdx,
        wanted: &[WantedExpert],
        compute: ComputeFn,
        meanwhile: &dyn Fn(),
    ) -> Result<(), CacheError> {
        let row = self.filler.small_row(layer).expect("the store has smaller copies");
        self.chosen.set(wanted);
        let mut assignment = std::mem::take(&mut self.assignment);
        assignment.pass_all(self.chosen.choice(row, &[]).wanted);
        self.ahead.retain(|(expert, _)| expert.row != row);
        if !self.pass_through.has_free() {
            self.reads_ahead.unused += self.pass_through.discard(|expert| expert.row == row) as u64;
        }
        self.small_reads += wanted.len() as u64;
        let outcome = LayerVisit::new(self, layer, row, &assignment).serve(compute, meanwhile);
        self.assignment = assignment;
        outcome
    }

    /// As [`visit`](Self::visit), but nothing is left behind: experts that are not resident pass through, the policies
    /// learn nothing of it, and the bytes that are read for it are counted apart.
    ///
    /// The caller guarantees a [pass-through slot](Self::has_pass_through).
    pub fn visit_beside(
        &mut self,
        layer: LayerIdx,
        wanted: &[WantedExpert],
        compute: ComputeFn,
        meanwhile: &dyn Fn(),
    ) -> Result<(), CacheError> {
        let row = self.row(layer);
        self.settle_hot();
        self.filler.set_prefetch_queue(VecDeque::new());
        self.ahead.clear();
        self.reads_ahead.unused += self.pass_through.discard(|_| false) as u64;
        self.chosen.set(wanted);
        let mut assignment = std::mem::take(&mut self.assignment);
        self.ledger.look_up(row, self.chosen.choice(row, &[]).wanted, &mut assignment);
        let before = (self.filler.demand_bytes, self.waited, self.computed);
        let outcome = LayerVisit::new(self, layer, row, &assignment).serve(compute, meanwhile);
        self.beside_bytes += self.filler.demand_bytes - before.0;
        (self.filler.demand_bytes, self.waited, self.computed) = before;
        self.assignment = assignment;
        outcome
    }
}
