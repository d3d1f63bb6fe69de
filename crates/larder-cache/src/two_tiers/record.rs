//! The record of what visits find: counts, the last visit, and the past of each expert.

use larder_core::ExpertKey;

use super::{ExpertLocation, TierCounts};
use crate::visit::Visit;

/// Counts, the result of the last visit, and the past of each expert.
pub(super) struct VisitRecord {
    /// The counts so far.
    pub counts: TierCounts,
    /// What the last layer to choose found, and the experts evicted since.
    pub visit: Visit,
    /// For each expert, whether it was ever read.
    seen: Vec<bool>,
    /// For each expert, whether it was prefetched and not wanted since.
    unused_prefetch: Vec<bool>,
    /// For each expert, whether it was copied to the device ahead and not wanted since.
    unused_copy: Vec<bool>,
}

impl VisitRecord {
    /// An empty record for this number of experts.
    pub fn new(experts: usize) -> Self {
        let (counts, visit) = Default::default();
        let [seen, unused_prefetch, unused_copy] = [(); 3].map(|()| vec![false; experts]);
        VisitRecord { counts, visit, seen, unused_prefetch, unused_copy }
    }

    /// A layer wants an expert that is at `found`.
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
        self.counts.useful_copies_ahead += u64::from(std::mem::take(&mut self.unused_copy[index]));
    }

    /// A read of an expert begins, on demand or as a prefetch.
    pub fn read_begins(&mut self, index: usize, prefetch: bool) {
        self.seen[index] = true;
        self.unused_prefetch[index] = prefetch;
        self.counts.prefetches += u64::from(prefetch);
    }

    /// A copy of an expert to the device begins, for a prediction or not.
    pub fn copy_begins(&mut self, index: usize, ahead: bool) {
        self.counts.promotions += 1;
        self.counts.copies_ahead += u64::from(ahead);
        self.unused_copy[index] = ahead;
    }

    /// An expert has left the device: if it was an unused copy, that was in vain.
    pub fn left_device(&mut self, index: usize) {
        self.unused_copy[index] = false;
    }

    /// An expert has left both tiers.
    pub fn evicted(&mut self, expert: ExpertKey) {
        self.counts.evictions += 1;
        self.visit.evicted.push(expert);
    }

    /// An expert is in no tier any more: if it was an unused prefetch, it was in vain.
    pub fn removed(&mut self, index: usize) {
        self.unused_prefetch[index] = false;
    }
}
