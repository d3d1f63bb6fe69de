/// What happened so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CacheCounts {
    /// Experts that were in memory when they were wanted.
    pub hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Experts that left to make room.
    pub evictions: u64,
    /// Misses of experts that had been in memory before.
    pub rereads: u64,
    /// Experts that were wanted while they were being read on a guess: neither hits nor misses.
    pub in_flight_hits: u64,
    /// Experts read on a guess.
    pub prefetches: u64,
    /// Guesses that were wanted before they left again.
    pub useful_prefetches: u64,
}

impl CacheCounts {
    /// Experts that were wanted.
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

    /// What happened between two looks.
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
