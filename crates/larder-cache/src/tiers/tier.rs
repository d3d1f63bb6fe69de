//! The ledger of one tier: which expert is in which of its slots.

use larder_policy::eviction::Setting;

use crate::ledger::SlotIndex;

/// Where an expert is, as far as one tier goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// Not in this tier.
    Absent,
    /// It has a slot whose bytes are on their way, to it or from it.
    Busy(SlotIndex),
    /// Its bytes are there and nobody touches them.
    There(SlotIndex),
}

/// The slots of one tier. Some may be lent to whatever passes through; those belong to no pool.
pub(super) struct Tier {
    /// What shares slots, and how many there are.
    pub setting: Setting,
    places: Vec<Place>,
    free: Vec<Vec<SlotIndex>>,
    /// Slots for what passes through that are free.
    spare: Vec<SlotIndex>,
    /// Of each slot, whether it is one for what passes through.
    passing: Vec<bool>,
}

impl Tier {
    /// All slots free. Those for what passes through are the setting's scratch slots.
    pub fn new(setting: &Setting) -> Self {
        let (pools, slots) = (setting.pools(), setting.slots);
        let kept = pools * slots;
        Tier {
            setting: *setting,
            places: vec![Place::Absent; setting.rows * setting.experts],
            free: (0..pools).map(|p| (p * slots..(p + 1) * slots).rev().collect()).collect(),
            spare: (kept..setting.all_slots()).rev().collect(),
            passing: (0..setting.all_slots()).map(|slot| slot >= kept).collect(),
        }
    }

    /// An expert's number among all of the tier.
    pub fn number(&self, row: usize, expert: usize) -> usize {
        row * self.setting.experts + expert
    }

    /// Where an expert is.
    pub fn place(&self, number: usize) -> Place {
        self.places[number]
    }

    /// Whether an expert's bytes are there.
    pub fn has(&self, number: usize) -> bool {
        matches!(self.places[number], Place::There(_))
    }

    /// A free slot of a row's pool.
    pub fn take(&mut self, row: usize) -> Option<SlotIndex> {
        self.free[self.setting.pool(row)].pop()
    }

    /// A free slot for what passes through.
    pub fn take_passing(&mut self) -> Option<SlotIndex> {
        self.spare.pop()
    }

    /// Whether this is a slot for what passes through.
    pub fn is_passing(&self, slot: SlotIndex) -> bool {
        self.passing[slot]
    }

    /// Bytes are on their way into the slot of an expert that was absent.
    pub fn expect(&mut self, number: usize, slot: SlotIndex) {
        debug_assert_eq!(self.places[number], Place::Absent);
        self.places[number] = Place::Busy(slot);
    }

    /// The bytes of an expert that is there are being copied from.
    pub fn lend(&mut self, number: usize) -> Option<SlotIndex> {
        let Place::There(slot) = self.places[number] else { return None };
        self.places[number] = Place::Busy(slot);
        Some(slot)
    }

    /// What was under way in an expert's slot is over, and its bytes are good.
    pub fn settle(&mut self, number: usize) {
        let Place::Busy(slot) = self.places[number] else { unreachable!("only what is under way ends") };
        self.places[number] = Place::There(slot);
    }

    /// An expert leaves. Its slot is the caller's.
    pub fn leave(&mut self, number: usize) -> SlotIndex {
        match std::mem::replace(&mut self.places[number], Place::Absent) {
            Place::Busy(slot) | Place::There(slot) => slot,
            Place::Absent => unreachable!("only who is there can leave"),
        }
    }

    /// Takes back the slot of an expert of `row`.
    pub fn give_back(&mut self, row: usize, slot: SlotIndex) {
        match self.passing[slot] {
            true => self.spare.push(slot),
            false => self.free[self.setting.pool(row)].push(slot),
        }
    }

    /// The pool keeps the slot `kept`, in which something was to pass through, and gives `instead` for it.
    pub fn exchange(&mut self, kept: SlotIndex, instead: SlotIndex) {
        self.passing.swap(kept, instead);
    }

    /// Whether every slot is free or has one expert, and each pool has as many as it should.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        let mut owned = vec![0; self.passing.len()];
        let mut of_pool = vec![0; self.setting.pools()];
        for (pool, free) in self.free.iter().enumerate() {
            free.iter().for_each(|slot| owned[*slot] += 1);
            of_pool[pool] += free.len();
            assert!(free.iter().all(|slot| !self.passing[*slot]));
        }
        self.spare.iter().for_each(|slot| owned[*slot] += 1);
        assert!(self.spare.iter().all(|slot| self.passing[*slot]));
        for (number, place) in self.places.iter().enumerate() {
            if let Place::Busy(slot) | Place::There(slot) = *place {
                owned[slot] += 1;
                of_pool[self.setting.pool(number / self.setting.experts)] += usize::from(!self.passing[slot]);
            }
        }
        owned.iter().all(|n| *n == 1) && of_pool.iter().all(|n| *n == self.setting.slots)
    }
}
