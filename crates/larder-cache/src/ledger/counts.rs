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

impl CacheCounts {
    /// Number of wanted experts.
    pub fn wanted(&self) -> u64 {
        self.hits + self.in_flight_hits + self.misses
    }
}

impl std::ops::Add for CacheCounts {
    type Output = CacheCounts;

    fn add(self, other: CacheCounts) -> CacheCounts {
        CacheCounts {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            rereads: self.rereads + other.rereads,
            in_flight_hits: self.in_flight_hits + other.in_flight_hits,
            prefetches: self.prefetches + other.prefetches,
            useful_prefetches: self.useful_prefetches + other.useful_prefetches,
        }
    }
}

impl std::ops::Sub for CacheCounts {
    type Output = CacheCounts;

    /// The counts between two readings.
    fn sub(self, then: CacheCounts) -> CacheCounts {
        CacheCounts {
            hits: self.hits - then.hits,
            misses: self.misses - then.misses,
            evictions: self.evictions - then.evictions,
            rereads: self.rereads - then.rereads,
            in_flight_hits: self.in_flight_hits - then.in_flight_hits,
            prefetches: self.prefetches - then.prefetches,
            useful_prefetches: self.useful_prefetches - then.useful_prefetches,
        }
    }
}
