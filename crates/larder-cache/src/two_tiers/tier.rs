//! The table of one tier: which expert is in which of its slots.

use larder_core::MoeRow;
use larder_policy::eviction::CacheShape;

use crate::one_tier::SlotIndex;

/// The state of an expert in one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TierState {
    /// Not in this tier.
    Absent,
    /// It has a slot that bytes are being copied or read into, or copied from.
    InFlight(SlotIndex),
    /// Its bytes are in a slot and not being copied.
    Resident(SlotIndex),
}

/// The slots of one tier. Scratch slots belong to no pool.
pub(super) struct Tier {
    /// The pools that share slots, and the number of slots.
    pub shape: CacheShape,
    states: Vec<TierState>,
    free: Vec<Vec<SlotIndex>>,
    /// Free scratch slots.
    free_scratch: Vec<SlotIndex>,
    /// For each slot, whether it is a scratch slot.
    scratch: Vec<bool>,
    /// For each row: its resident experts, and how many experts have left so far.
    rows: Vec<RowState>,
}

/// Counts of a row of experts.
#[derive(Clone, Copy, Default)]
struct RowState {
    resident: usize,
    removed: u64,
}

impl Tier {
    /// A tier with all slots free.
    pub fn new(shape: &CacheShape) -> Self {
        let (pools, slots) = (shape.pools(), shape.slots);
        let kept = pools * slots;
        Tier {
            shape: *shape,
            states: vec![TierState::Absent; shape.rows * shape.experts],
            free: (0..pools).map(|p| (p * slots..(p + 1) * slots).rev().collect()).collect(),
            free_scratch: (kept..shape.total_slots()).rev().collect(),
            scratch: (0..shape.total_slots()).map(|slot| slot >= kept).collect(),
            rows: vec![RowState::default(); shape.rows],
        }
    }

    /// The state of an expert.
    pub fn state(&self, index: usize) -> TierState {
        self.states[index]
    }

    /// Whether an expert is resident.
    pub fn is_resident(&self, index: usize) -> bool {
        matches!(self.states[index], TierState::Resident(_))
    }

    /// How many experts of a row have left so far, if all of them are resident now.
    pub fn whole_row(&self, row: MoeRow) -> Option<u64> {
        let RowState { resident, removed } = self.rows[row.index()];
        (resident == self.shape.experts).then_some(removed)
    }

    /// Whether a row's pool has a slot for each of its experts.
    pub fn has_room_for_all(&self) -> bool {
        self.shape.slots >= self.shape.keys_per_pool()
    }

    /// Takes a free slot of a row's pool.
    pub fn take_free(&mut self, row: MoeRow) -> Option<SlotIndex> {
        self.free[self.shape.pool(row)].pop()
    }

    /// Takes a free scratch slot.
    pub fn take_scratch(&mut self) -> Option<SlotIndex> {
        self.free_scratch.pop()
    }

    /// Whether this is a scratch slot.
    pub fn is_scratch(&self, slot: SlotIndex) -> bool {
        self.scratch[slot]
    }

    /// A read or copy into the slot of an absent expert begins.
    pub fn begin_arrival(&mut self, index: usize, slot: SlotIndex) {
        debug_assert_eq!(self.states[index], TierState::Absent);
        self.states[index] = TierState::InFlight(slot);
    }

    /// A copy out of a resident expert's slot begins.
    pub fn begin_copy(&mut self, index: usize) -> Option<SlotIndex> {
        let TierState::Resident(slot) = self.states[index] else { return None };
        self.states[index] = TierState::InFlight(slot);
        self.rows[index / self.shape.experts].resident -= 1;
        Some(slot)
    }

    /// The operation in an expert's slot has succeeded: the expert is resident.
    pub fn mark_resident(&mut self, index: usize) {
        let TierState::InFlight(slot) = self.states[index] else { unreachable!("only an operation in flight ends") };
        self.states[index] = TierState::Resident(slot);
        self.rows[index / self.shape.experts].resident += 1;
    }

    /// Removes an expert and returns its slot to the caller.
    pub fn remove(&mut self, index: usize) -> SlotIndex {
        let row = &mut self.rows[index / self.shape.experts];
        row.removed += 1;
        match std::mem::replace(&mut self.states[index], TierState::Absent) {
            TierState::InFlight(slot) => slot,
            TierState::Resident(slot) => {
                row.resident -= 1;
                slot
            }
            TierState::Absent => unreachable!("only an expert with a slot can be removed"),
        }
    }

    /// Frees the slot of an expert of `row`.
    pub fn release(&mut self, row: MoeRow, slot: SlotIndex) {
        if self.scratch[slot] { self.free_scratch.push(slot) } else { self.free[self.shape.pool(row)].push(slot) }
    }

    /// Makes the scratch slot `kept` a slot of the pool, and `instead` a scratch slot.
    pub fn swap_scratch(&mut self, kept: SlotIndex, instead: SlotIndex) {
        self.scratch.swap(kept, instead);
    }

    /// Whether every slot is free or holds one expert, and each pool has its number of slots.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        use larder_core::ExpertKey;

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
                let row = ExpertKey::from_index(index, self.shape.experts).row;
                of_pool[self.shape.pool(row)] += usize::from(!self.scratch[slot]);
            }
        }
        owned.iter().all(|n| *n == 1) && of_pool.iter().all(|n| *n == self.shape.slots)
    }
}
