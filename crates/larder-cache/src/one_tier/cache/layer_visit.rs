//! The visit of one layer: its reads begin, what is resident is computed, then other work of the layer, then what
//! arrives.
//!
//! Reads never wait for the computation of other experts, except that a slot is read into after its hit has been
//! computed. A miss that does not stay is read into a pass-through slot, which the next one gets when it has been
//! computed. So any number of experts is read once, through few slots and without a pause.
//!
//! A visit of few rows reads gate and up of all misses before the rest of any, and computes with them while the rest is
//! read. So little is left to compute when the last byte arrives and the SSD idles.

use std::collections::VecDeque;

use larder_core::{ComputeStage, ExpertKey, LayerIdx, MoeRow, STAGED_ROWS};

use larder_store::reader::ReadGoal;

use super::{Cache, CacheError, ComputeFn, Few};
use crate::fill::CompletedRead;
use crate::one_tier::ledger::{SlotAssignment, SlotIndex};

/// Rows of activations, of all experts together, that are computed before completed reads are looked at again: a few
/// milliseconds of work, and enough for all threads.
const GROUP_ROWS: usize = 64;

/// A visit in progress.
pub(super) struct LayerVisit<'a> {
    cache: &'a mut Cache,
    layer: LayerIdx,
    row: MoeRow,
    assignment: &'a SlotAssignment,
    /// Misses whose slots are those of hits that have not been computed.
    blocked: Few<(usize, SlotIndex)>,
    /// Misses without a slot that have not found a pass-through slot.
    passing: VecDeque<usize>,
    /// Experts that have arrived and have not been computed, and where they are.
    arrived: VecDeque<(usize, SlotIndex)>,
    /// Whether misses are read and computed in two halves.
    in_halves: bool,
    /// Experts of which gate and up alone have arrived and have not been computed, and where they are.
    fronts: Few<(usize, SlotIndex)>,
    /// Experts whose products with gate and up have been computed, and that are not yet computed to the end.
    begun: Few<usize>,
    /// Number of misses and experts in flight that have been neither computed nor given up.
    outstanding: usize,
    error: Option<CacheError>,
}

impl<'a> LayerVisit<'a> {
    /// The visit of what the ledger has opened as `assignment`.
    pub fn new(cache: &'a mut Cache, layer: LayerIdx, row: MoeRow, assignment: &'a SlotAssignment) -> Self {
        let outstanding = assignment.misses.len() + assignment.in_flight.len();
        let in_halves = cache.chosen.rows() <= STAGED_ROWS;
        cache.filler.set_goal(if in_halves { ReadGoal::Arrival } else { ReadGoal::Throughput });
        let (blocked, passing, arrived, fronts, begun) = Default::default();
        let error = None;
        LayerVisit {
            cache,
            layer,
            row,
            assignment,
            blocked,
            passing,
            arrived,
            in_halves,
            fronts,
            begun,
            outstanding,
            error,
        }
    }

    /// Computes every expert once, and calls `meanwhile` before the first wait. After an error no wanted expert is in
    /// flight.
    pub fn serve(mut self, compute: ComputeFn, meanwhile: &dyn Fn()) -> Result<(), CacheError> {
        self.begin_reads();
        self.compute_hits(compute);
        let mut other_work = Some(meanwhile);
        loop {
            self.poll();
            if self.error.is_some() {
                self.give_up();
            }
            if self.outstanding == 0 {
                break;
            } else if !self.arrived.is_empty() {
                self.compute_arrived(compute);
            } else if !self.fronts.is_empty() {
                self.compute_fronts(compute);
            } else if let Some(meanwhile) = other_work.take() {
                meanwhile();
            } else {
                self.wait();
            }
        }
        self.error.map_or(Ok(()), Err)
    }

    /// Waits for a read.
    fn wait(&mut self) {
        let cache = &mut *self.cache;
        cache.filler.complete(&mut cache.waited, &mut cache.completed);
        assert!(!cache.completed.is_empty() || cache.filler.has_fronts(), "a read is in flight");
        self.end_reads();
    }

    /// Queues the reads of all misses that have not been read ahead, each as soon as it has a slot.
    fn begin_reads(&mut self) {
        let (cache, assignment) = (&mut *self.cache, self.assignment);
        for &(expert, slot) in &assignment.misses {
            let key = self.row.expert(expert);
            if cache.pass_through.holds(key) {
                cache.reads_ahead.used += 1;
                self.arrived.extend(cache.pass_through.arrived(key).map(|at| (expert, at)));
                continue;
            }
            match slot {
                None => self.passing.push_back(expert),
                Some(at) if is_of_hit(assignment, at) => self.blocked.push((expert, at)),
                Some(at) => read(cache, key, at, self.in_halves),
            }
        }
    }

    /// Begins the reads that have found a slot, then those for the next layer.
    fn continue_reads(&mut self) {
        let cache = &mut *self.cache;
        while let Some(expert) = self.passing.front()
            && let Some(at) = cache.pass_through.take(self.row.expert(*expert))
        {
            read(cache, self.row.expert(*expert), at, self.in_halves);
            self.passing.pop_front();
        }
        cache.filler.submit();
        cache.prefetch_if_idle();
        if self.passing.is_empty() && self.blocked.is_empty() && !cache.filler.has_waiting_reads() {
            cache.begin_reads_ahead();
        }
    }

    /// Takes note of all reads that have completed, and keeps the SSD busy.
    fn poll(&mut self) {
        self.cache.filler.poll(&mut self.cache.completed);
        self.end_reads();
        self.continue_reads();
    }

    fn end_reads(&mut self) {
        let mut fronts = std::mem::take(&mut self.cache.fronts);
        self.cache.filler.take_fronts(&mut fronts);
        self.fronts.extend(fronts.drain(..).map(|at| (self.cache.filler.front(at).0.expert.index(), at)));
        self.cache.fronts = fronts;
        let mut completed = std::mem::take(&mut self.cache.completed);
        completed.drain(..).for_each(|read| self.end_read(read));
        self.cache.completed = completed;
    }

    fn end_read(&mut self, read: CompletedRead) {
        let cache = &mut *self.cache;
        let is_wanted_by_someone = cache.end_read(&read);
        let CompletedRead { expert: key, at, result, .. } = read;
        let expert = key.expert.index();
        self.fronts.retain(|(_, front)| *front != at);
        let is_of_visit = || cache.pass_through.owns(at) || self.assignment.experts().any(|wanted| wanted == expert);
        let wanted = is_wanted_by_someone && key.row == self.row && is_of_visit();
        match result {
            Ok(()) if wanted => self.arrived.push_back((expert, at)),
            Err(cause) if wanted => {
                if cache.pass_through.owns(at) {
                    self.leave_slot(key);
                }
                self.outstanding -= 1;
                let (layer, expert) = (self.layer, key.expert);
                self.error.get_or_insert(CacheError { layer, expert, cause });
            }
            _ => {}
        }
    }

    /// Computes the hits: first those whose slots are needed, then the others.
    fn compute_hits(&mut self, compute: ComputeFn) {
        let needed = |at: SlotIndex| self.assignment.misses.iter().any(|(_, slot)| *slot == Some(at));
        let (leaving, staying): (Few<_>, Few<_>) =
            self.assignment.hits.iter().copied().partition(|(_, at)| needed(*at));
        for hits in [leaving, staying] {
            self.poll();
            let mut rest = &hits[..];
            while !rest.is_empty() {
                let (group, others) = rest.split_at(self.group_len(rest.iter().map(|(expert, _)| *expert)));
                self.cache.compute_group(self.row, ComputeStage::Whole, group, compute);
                self.poll();
                rest = others;
            }
            for (expert, at) in self.blocked.drain(..) {
                read(self.cache, self.row.expert(expert), at, self.in_halves);
            }
        }
    }

    /// Computes a group of the experts that have arrived. Those that stay leave their pass-through slots before, the
    /// others after.
    fn compute_arrived(&mut self, compute: ComputeFn) {
        let len = self.group_len(self.arrived.iter().map(|(expert, _)| *expert));
        let mut group: Few<_> = self.arrived.drain(..len).collect();
        let cache = &mut *self.cache;
        for (expert, at) in &mut group {
            if cache.pass_through.owns(*at)
                && let Some(slot) = slot_of(self.assignment, *expert)
            {
                cache.filler.move_expert(self.row, *at, slot);
                cache.ledger.arrived(self.row.expert(*expert));
                cache.pass_through.release(*at);
                *at = slot;
            }
        }
        let (begun, whole): (Few<_>, Few<_>) =
            group.iter().copied().partition(|(expert, _)| self.begun.contains(expert));
        for (stage, experts) in [(ComputeStage::Rest, begun), (ComputeStage::Whole, whole)] {
            if !experts.is_empty() {
                cache.compute_group(self.row, stage, &experts, compute);
            }
        }
        self.begun.retain(|expert| group.iter().all(|(computed, _)| computed != expert));
        for (_, at) in &group {
            if self.cache.pass_through.owns(*at) {
                self.cache.pass_through.release(*at);
            }
        }
        self.outstanding -= group.len();
    }

    /// Computes with gate and up of the experts whose rest is being read.
    fn compute_fronts(&mut self, compute: ComputeFn) {
        let fronts = std::mem::take(&mut self.fronts);
        self.cache.compute_group(self.row, ComputeStage::Inputs, &fronts, compute);
        self.begun.extend(fronts.iter().map(|(expert, _)| *expert));
    }

    /// How many of the first of `experts` are computed together.
    fn group_len(&self, experts: impl Iterator<Item = usize>) -> usize {
        let mut rows = 0;
        let full = |expert: usize| {
            let before = rows;
            rows += self.cache.chosen.tokens_of(expert);
            before < GROUP_ROWS
        };
        experts.map(full).take_while(|fits| *fits).count()
    }

    /// After an error: gives up all reads that have not begun, and all experts that have arrived.
    fn give_up(&mut self) {
        self.outstanding -= self.passing.len() + self.blocked.len() + self.arrived.len();
        self.passing.clear();
        self.fronts.clear();
        for (expert, _) in std::mem::take(&mut self.blocked) {
            self.leave_slot(self.row.expert(expert));
        }
        for (expert, at) in std::mem::take(&mut self.arrived) {
            if self.cache.pass_through.owns(at) {
                self.cache.pass_through.release(at);
                self.leave_slot(self.row.expert(expert));
            }
        }
    }

    /// Tells the ledger that the slot of a miss, if it has one, is not read into.
    fn leave_slot(&mut self, key: ExpertKey) {
        if slot_of(self.assignment, key.expert.index()).is_some() {
            self.cache.ledger.failed(key);
        }
    }
}

/// Queues the read of a miss.
fn read(cache: &mut Cache, key: ExpertKey, at: SlotIndex, in_halves: bool) {
    if in_halves { cache.filler.read_in_halves(key, at) } else { cache.filler.read(key, at) }
}

fn is_of_hit(assignment: &SlotAssignment, at: SlotIndex) -> bool {
    assignment.hits.iter().any(|(_, hit)| *hit == at)
}

fn slot_of(assignment: &SlotAssignment, expert: usize) -> Option<SlotIndex> {
    assignment.reads_into_slots().find_map(|(miss, slot)| (miss == expert).then_some(slot))
}
