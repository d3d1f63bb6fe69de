//! How long experts stay in the cache.

use larder_cache::SlotAssignment;
use larder_core::{ExpertKey, MoeRow};

/// A miss at most this many passes after the expert's eviction counts as a re-fetch.
pub const REFETCH_WITHIN: u32 = 5;

const NEVER: u32 = u32::MAX;

/// Times that experts stayed in the cache, in forward passes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LifetimeStats {
    /// Passes that experts were resident, summed over all stays.
    pub resident_passes: u64,
    /// Number of stays, including those that the end of the replay cut off.
    pub stays: u64,
    /// Histogram of stays that ended, by length: below 1 pass, below 2, below 4, and so on.
    pub length_counts: Vec<u64>,
    /// Misses of experts that were evicted at most [`REFETCH_WITHIN`] passes before.
    pub refetches: u64,
}

impl LifetimeStats {
    /// Mean length of a stay in passes.
    pub fn mean(&self) -> f64 {
        self.resident_passes as f64 / self.stays.max(1) as f64
    }

    pub(crate) fn add(&mut self, other: &LifetimeStats) {
        self.resident_passes += other.resident_passes;
        self.stays += other.stays;
        self.refetches += other.refetches;
        if self.length_counts.len() < other.length_counts.len() {
            self.length_counts.resize(other.length_counts.len(), 0);
        }
        self.length_counts.iter_mut().zip(&other.length_counts).for_each(|(sum, n)| *sum += n);
    }
}

/// Follows insertions and evictions during a replay.
pub(crate) struct ResidencyTracker {
    experts: usize,
    /// The current pass.
    now: u32,
    last_row: MoeRow,
    /// The pass in which each resident expert was inserted, or [`NEVER`].
    inserted: Vec<u32>,
    /// The pass of each expert's last eviction, or [`NEVER`].
    last_evicted: Vec<u32>,
    lifetimes: LifetimeStats,
}

impl ResidencyTracker {
    pub fn new(rows: usize, experts: usize) -> Self {
        let never = vec![NEVER; rows * experts];
        ResidencyTracker {
            experts,
            now: 0,
            last_row: MoeRow(0),
            inserted: never.clone(),
            last_evicted: never,
            lifetimes: LifetimeStats::default(),
        }
    }

    /// Notes that a layer is visited; a row that is not after the last one begins a new pass.
    pub fn visit(&mut self, row: MoeRow) {
        self.now += u32::from(row <= self.last_row);
        self.last_row = row;
    }

    /// Notes which experts came into slots and which were evicted in a visit of that layer.
    pub fn assigned(&mut self, row: MoeRow, assignment: &SlotAssignment) {
        for (expert, _) in assignment.reads_into_slots() {
            let at = row.expert(expert).index(self.experts);
            self.inserted[at] = self.now;
            self.lifetimes.stays += 1;
            let evicted = self.last_evicted[at];
            self.lifetimes.refetches += u64::from(evicted != NEVER && self.now - evicted <= REFETCH_WITHIN);
        }
        self.evicted(&assignment.evicted);
    }

    /// Notes which experts were evicted.
    pub fn evicted(&mut self, experts: &[ExpertKey]) {
        experts.iter().for_each(|expert| self.evict(expert.index(self.experts)));
    }

    fn evict(&mut self, at: usize) {
        let length = self.now - std::mem::replace(&mut self.inserted[at], NEVER);
        self.last_evicted[at] = self.now;
        self.lifetimes.resident_passes += u64::from(length);
        let class = (u32::BITS - length.leading_zeros()) as usize;
        if self.lifetimes.length_counts.len() <= class {
            self.lifetimes.length_counts.resize(class + 1, 0);
        }
        self.lifetimes.length_counts[class] += 1;
    }

    /// The statistics, including the stays of experts that are still resident.
    pub fn finish(mut self) -> LifetimeStats {
        let resident = self.inserted.iter().filter(|inserted| **inserted != NEVER);
        self.lifetimes.resident_passes += resident.map(|inserted| u64::from(self.now - inserted)).sum::<u64>();
        self.lifetimes
    }
}

#[cfg(test)]
mod tests {
    use larder_core::ExpertKey;

    use super::*;

    fn assignment(misses: &[usize], evicted: &[ExpertKey]) -> SlotAssignment {
        let misses = misses.iter().map(|e| (*e, Some(0))).collect();
        SlotAssignment { misses, evicted: evicted.to_vec(), ..SlotAssignment::default() }
    }

    #[test]
    fn stays_are_counted_in_passes_and_quick_returns_as_refetches() {
        let mut tracker = ResidencyTracker::new(2, 4);
        tracker.visit(MoeRow(0)); // pass 1
        tracker.assigned(MoeRow(0), &assignment(&[0, 1], &[]));
        tracker.visit(MoeRow(1));
        tracker.assigned(MoeRow(1), &assignment(&[3], &[MoeRow(0).expert(1)])); // 1 is evicted in the pass in which it was inserted
        (0..3).for_each(|_| tracker.visit(MoeRow(0))); // passes 2 to 4
        tracker.assigned(MoeRow(0), &assignment(&[1], &[MoeRow(0).expert(0)])); // 1 is back after 3 passes, 0 is evicted after 3
        (0..6).for_each(|_| tracker.visit(MoeRow(0))); // passes 5 to 10
        tracker.assigned(MoeRow(0), &assignment(&[0], &[])); // 0 is back after 6 passes
        let lifetimes = tracker.finish();
        assert_eq!((lifetimes.stays, lifetimes.refetches), (5, 1));
        assert_eq!(lifetimes.length_counts, [1, 0, 1]);
        assert_eq!(lifetimes.resident_passes, 3 + 9 + 6); // 0, then the resident ones: (1, 3), 1 and 0
    }

    #[test]
    fn histograms_are_added_class_by_class() {
        let mut one = LifetimeStats { resident_passes: 4, stays: 2, length_counts: vec![1], refetches: 1 };
        one.add(&LifetimeStats { resident_passes: 6, stays: 3, length_counts: vec![1, 0, 2], refetches: 0 });
        assert_eq!(one, LifetimeStats { resident_passes: 10, stays: 5, length_counts: vec![2, 0, 2], refetches: 1 });
        assert_eq!(one.mean(), 2.0);
    }
}
