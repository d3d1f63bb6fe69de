/// What happened so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Experts that were in memory when they were wanted.
    pub hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Experts that left to make room.
    pub evictions: u64,
    /// Misses of experts that had been in memory before.
    pub rereads: u64,
    /// Experts that were wanted while they were being read on a guess: neither hits nor misses.
    pub awaited: u64,
    /// Experts read on a guess.
    pub guesses: u64,
    /// Guesses that were wanted before they left again.
    pub useful: u64,
}

impl Counts {
    /// Experts that were wanted.
    pub fn wanted(&self) -> u64 {
        self.hits + self.awaited + self.misses
    }
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            rereads: self.rereads + other.rereads,
            awaited: self.awaited + other.awaited,
            guesses: self.guesses + other.guesses,
            useful: self.useful + other.useful,
        }
    }
}

impl std::ops::Sub for Counts {
    type Output = Counts;

    /// What happened between two looks.
    fn sub(self, then: Counts) -> Counts {
        Counts {
            hits: self.hits - then.hits,
            misses: self.misses - then.misses,
            evictions: self.evictions - then.evictions,
            rereads: self.rereads - then.rereads,
            awaited: self.awaited - then.awaited,
            guesses: self.guesses - then.guesses,
            useful: self.useful - then.useful,
        }
    }
}
