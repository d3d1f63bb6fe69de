//! A wave: wanted experts that are resident at once.

use larder_core::ExpertKey;

/// Index of a slot, counted over all pools.
pub type SlotIndex = usize;

/// The subset of a layer's wanted experts that fit into the slots at once.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Wave {
    /// Resident experts, in the order wanted.
    pub hits: Vec<(usize, SlotIndex)>,
    /// Experts that are being prefetched, in the order wanted.
    pub in_flight: Vec<(usize, SlotIndex)>,
    /// Experts that have to be read, in the order wanted, and the slots assigned to them.
    pub misses: Vec<(usize, SlotIndex)>,
    /// Experts of any layer that were evicted when the wave was opened or closed.
    pub evicted: Vec<ExpertKey>,
}

impl Wave {
    /// Number of experts in the wave.
    pub fn len(&self) -> usize {
        self.hits.len() + self.in_flight.len() + self.misses.len()
    }

    /// Whether the wave includes this expert.
    pub fn covers(&self, expert: usize) -> bool {
        self.experts().any(|e| e == expert)
    }

    /// Whether the wave includes no expert.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The experts of the wave.
    pub fn experts(&self) -> impl Iterator<Item = usize> + '_ {
        self.hits.iter().chain(&self.in_flight).chain(&self.misses).map(|(expert, _)| *expert)
    }

    /// Empties the wave and keeps its allocations.
    pub(super) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }
}
