//! What a visit finds and gets: its hits, and the slots that its misses are read into.

use larder_core::{ExpertId, ExpertKey};

/// Index of a slot, counted over all pools.
pub type SlotIndex = usize;

/// The wanted experts of a visit, by what the ledger has assigned to them.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SlotAssignment {
    /// Resident experts and their slots, in the order wanted. A slot may be that of a miss as well, which is read into
    /// it once the hit has been used.
    pub hits: Vec<(usize, SlotIndex)>,
    /// Experts that are being prefetched, in the order wanted.
    pub in_flight: Vec<(usize, SlotIndex)>,
    /// Experts that have to be read, in the order wanted, and the slots assigned to them; `None` for one that does not
    /// stay.
    pub misses: Vec<(usize, Option<SlotIndex>)>,
    /// Experts of any layer that were evicted when the visit was opened or closed.
    pub evicted: Vec<ExpertKey>,
}

/// The consequences of a change of the capacity.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CapacityChange {
    /// Slots that are in use from now on.
    pub added: Vec<SlotIndex>,
    /// Slots that are not in use any more.
    pub removed: Vec<SlotIndex>,
    /// Experts that were evicted.
    pub evicted: Vec<ExpertKey>,
}

impl CapacityChange {
    /// Empties it and keeps its allocations.
    pub(super) fn clear(&mut self) {
        self.added.clear();
        self.removed.clear();
        self.evicted.clear();
    }
}

impl SlotAssignment {
    /// Whether an expert is a miss.
    pub fn misses(&self, expert: ExpertId) -> bool {
        self.misses.iter().any(|(miss, _)| *miss == expert.index())
    }

    /// The misses that have a slot.
    pub fn reads_into_slots(&self) -> impl Iterator<Item = (usize, SlotIndex)> + '_ {
        self.misses.iter().filter_map(|(expert, slot)| Some((*expert, (*slot)?)))
    }

    /// All experts of the visit.
    pub fn experts(&self) -> impl Iterator<Item = usize> + '_ {
        let with_slot = self.hits.iter().chain(&self.in_flight).map(|(expert, _)| *expert);
        with_slot.chain(self.misses.iter().map(|(expert, _)| *expert))
    }

    /// Replaces it by misses that do not stay.
    pub fn pass_all(&mut self, experts: &[usize]) {
        self.clear();
        self.misses.extend(experts.iter().map(|expert| (*expert, None)));
    }

    /// Takes the slot of a miss away.
    pub(super) fn pass_through(&mut self, expert: usize) {
        let miss = self.misses.iter_mut().find(|(miss, _)| *miss == expert);
        miss.expect("an expert that is being read for this visit is a miss").1 = None;
    }

    /// Empties it and keeps its allocations.
    pub(super) fn clear(&mut self) {
        self.hits.clear();
        self.in_flight.clear();
        self.misses.clear();
        self.evicted.clear();
    }
}
