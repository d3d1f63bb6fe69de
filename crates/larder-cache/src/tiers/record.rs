//! What happened in the tiers, written down as it happens.

use super::{ExpertLocation, TierCounts};
use crate::cache::Visit;

/// CacheCounts, what the last layer found, and what is known of each expert's past.
pub(super) struct VisitRecord {
    /// What happened so far.
    pub counts: TierCounts,
    /// What the last layer that has chosen found, and who left since.
    pub visit: Visit,
    /// Of each expert, whether it was ever read.
    seen: Vec<bool>,
    /// Of each, whether it was read on a guess and not wanted since.
    unused_prefetch: Vec<bool>,
}

impl VisitRecord {
    /// Nothing happened yet to so many experts.
    pub fn new(experts: usize) -> Self {
        let (counts, visit) = Default::default();
        VisitRecord { counts, visit, seen: vec![false; experts], unused_prefetch: vec![false; experts] }
    }

    /// A layer wants an expert, and this is where it was.
    pub fn wanted(&mut self, index: usize, expert: usize, found: ExpertLocation) {
        let (count, list) = match found {
            ExpertLocation::Device(_) => (&mut self.counts.device_hits, &mut self.visit.hits),
            ExpertLocation::Host(_) => (&mut self.counts.host_hits, &mut self.visit.hits),
            ExpertLocation::InFlight => (&mut self.counts.in_flight_hits, &mut self.visit.in_flight),
            ExpertLocation::Absent => (&mut self.counts.misses, &mut self.visit.misses),
        };
        *count += 1;
        list.push(expert);
        self.counts.rereads += u64::from(found == ExpertLocation::Absent && self.seen[index]);
        self.counts.useful_prefetches += u64::from(std::mem::take(&mut self.unused_prefetch[index]));
    }

    /// An expert is being read, as it is wanted or on a guess.
    pub fn read_begins(&mut self, index: usize, prefetch: bool) {
        self.seen[index] = true;
        self.unused_prefetch[index] = prefetch;
        self.counts.prefetches += u64::from(prefetch);
    }

    /// An expert has left both tiers.
    pub fn evicted(&mut self, row: usize, expert: usize) {
        self.counts.evictions += 1;
        self.visit.evicted.push((row, expert));
    }

    /// An expert is in no tier any more: if it was read on a guess, then in vain.
    pub fn removed(&mut self, index: usize) {
        self.unused_prefetch[index] = false;
    }
}
