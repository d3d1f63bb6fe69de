//! The counts of a ledger.

/// Counts of a ledger since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CacheCounts {
    /// Wanted experts that were resident.
    pub hits: u64,
    /// Wanted experts that had to be read.
    pub misses: u64,
    /// Experts that were evicted.
    pub evictions: u64,
    /// Misses of experts that had been read before.
    pub rereads: u64,
    /// Wanted experts that were still being prefetched: neither hits nor misses.
    pub in_flight_hits: u64,
    /// Experts that were prefetched.
    pub prefetches: u64,
    /// Prefetched experts that were wanted before they were evicted.
    pub useful_prefetches: u64,
}

larder_core::fieldwise!(CacheCounts {
    hits,
    misses,
    evictions,
    rereads,
    in_flight_hits,
    prefetches,
    useful_prefetches
});

impl CacheCounts {
    /// Number of wanted experts.
    pub fn wanted(&self) -> u64 {
        self.hits + self.in_flight_hits + self.misses
    }
}
