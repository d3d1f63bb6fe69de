/// A slot, counted over all pools.
pub type SlotIndex = usize;

/// Experts of one layer that can be in memory together.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Wave {
    /// Experts that are there, in the order wanted.
    pub hits: Vec<(usize, SlotIndex)>,
    /// Experts that are being read on a guess, in the order wanted.
    pub in_flight: Vec<(usize, SlotIndex)>,
    /// Experts that have to be read, in the order wanted, into the slots they were given.
    pub misses: Vec<(usize, SlotIndex)>,
    /// Row and expert of those that left to make room, when it was opened or closed.
    pub evicted: Vec<(usize, usize)>,
}

impl Wave {
    /// How many experts it covers.
    pub fn len(&self) -> usize {
        self.hits.len() + self.in_flight.len() + self.misses.len()
    }

    /// Whether it covers this expert.
    pub fn covers(&self, expert: usize) -> bool {
        self.experts().any(|e| e == expert)
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The experts it covers.
    pub fn experts(&self) -> impl Iterator<Item = usize> + '_ {
        self.hits.iter().chain(&self.in_flight).chain(&self.misses).map(|(expert, _)| *expert)
    }

    /// Forgets everything and keeps its memory.
    pub(super) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }
}
