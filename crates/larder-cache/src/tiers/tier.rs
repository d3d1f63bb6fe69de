//! The ledger of one tier: which expert is in which of its slots.

use larder_policy::eviction::CacheShape;

use crate::ledger::SlotIndex;

/// Where an expert is, as far as one tier goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TierState {
    /// Not in this tier.
    Absent,
    /// It has a slot whose bytes are on their way, to it or from it.
    InFlight(SlotIndex),
    /// Its bytes are there and nobody touches them.
    Resident(SlotIndex),
}

/// The slots of one tier. Some may be lent to whatever passes through; those belong to no pool.
pub(super) struct Tier {
    /// What shares slots, and how many there are.
    pub shape: CacheShape,
    states: Vec<TierState>,
    free: Vec<Vec<SlotIndex>>,
    /// Slots for what passes through that are free.
    free_scratch: Vec<SlotIndex>,
    /// Of each slot, whether it is one for what passes through.
    scratch: Vec<bool>,
}

impl Tier {
    /// All slots free. Those for what passes through are the setting's scratch slots.
    pub fn new(shape: &CacheShape) -> Self {
        let (pools, slots) = (shape.pools(), shape.slots);
        let kept = pools * slots;
        Tier {
            shape: *shape,
            states: vec![TierState::Absent; shape.rows * shape.experts],
            free: (0..pools).map(|p| (p * slots..(p + 1) * slots).rev().collect()).collect(),
            free_scratch: (kept..shape.total_slots()).rev().collect(),
            scratch: (0..shape.total_slots()).map(|slot| slot >= kept).collect(),
        }
    }

    /// An expert's number among all of the tier.
    pub fn index(&self, row: usize, expert: usize) -> usize {
        row * self.shape.experts + expert
    }

    /// Where an expert is.
    pub fn state(&self, index: usize) -> TierState {
        self.states[index]
    }

    /// Whether an expert's bytes are there.
    pub fn is_resident(&self, index: usize) -> bool {
        matches!(self.states[index], TierState::Resident(_))
    }

    /// A free slot of a row's pool.
    pub fn take_free(&mut self, row: usize) -> Option<SlotIndex> {
        self.free[self.shape.pool(row)].pop()
    }

    /// A free slot for what passes through.
    pub fn take_scratch(&mut self) -> Option<SlotIndex> {
        self.free_scratch.pop()
    }

    /// Whether this is a slot for what passes through.
    pub fn is_scratch(&self, slot: SlotIndex) -> bool {
        self.scratch[slot]
    }

    /// Bytes are on their way into the slot of an expert that was absent.
    pub fn begin_arrival(&mut self, index: usize, slot: SlotIndex) {
        debug_assert_eq!(self.states[index], TierState::Absent);
        self.states[index] = TierState::InFlight(slot);
    }

    /// The bytes of an expert that is there are being copied from.
    pub fn begin_copy(&mut self, index: usize) -> Option<SlotIndex> {
        let TierState::Resident(slot) = self.states[index] else { return None };
        self.states[index] = TierState::InFlight(slot);
        Some(slot)
    }

    /// What was under way in an expert's slot is over, and its bytes are good.
    pub fn mark_resident(&mut self, index: usize) {
        let TierState::InFlight(slot) = self.states[index] else { unreachable!("only what is under way ends") };
        self.states[index] = TierState::Resident(slot);
    }

    /// An expert leaves. Its slot is the caller's.
    pub fn remove(&mut self, index: usize) -> SlotIndex {
        match std::mem::replace(&mut self.states[index], TierState::Absent) {
            TierState::InFlight(slot) | TierState::Resident(slot) => slot,
            TierState::Absent => unreachable!("only who is there can leave"),
        }
    }

    /// Takes back the slot of an expert of `row`.
    pub fn release(&mut self, row: usize, slot: SlotIndex) {
        match self.scratch[slot] {
            true => self.free_scratch.push(slot),
            false => self.free[self.shape.pool(row)].push(slot),
        }
    }

    /// The pool keeps the slot `kept`, in which something was to pass through, and gives `instead` for it.
    pub fn swap_scratch(&mut self, kept: SlotIndex, instead: SlotIndex) {
        self.scratch.swap(kept, instead);
    }

    /// Whether every slot is free or has one expert, and each pool has as many as it should.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        let mut owned = vec![0; self.scratch.len()];
        let mut of_pool = vec![0; self.shape.pools()];
        for (pool, free) in self.free.iter().enumerate() {
            free.iter().for_each(|slot| owned[*slot] += 1);
            of_pool[pool] += free.len();
            assert!(free.iter().all(|slot| !self.scratch[*slot]));
        }
        self.free_scratch.iter().for_each(|slot| owned[*slot] += 1);
        assert!(self.free_scratch.iter().all(|slot| self.scratch[*slot]));
        for (index, state) in self.states.iter().enumerate() {
            if let TierState::InFlight(slot) | TierState::Resident(slot) = *state {
                owned[slot] += 1;
                of_pool[self.shape.pool(index / self.shape.experts)] += usize::from(!self.scratch[slot]);
            }
        }
        owned.iter().all(|n| *n == 1) && of_pool.iter().all(|n| *n == self.shape.slots)
    }
}
