//! Two tiers of slots over the SSD: those of a device with memory of its own, and those in memory below it.
//!
//! [`Tiers`] says which expert is where and who moves; it moves no bytes. Each tier has a ledger of its own, and one
//! policy per pool ranks all that are in either. The [`TieredCache`] moves the bytes: it asks the tiers, submits reads
//! and copies, and hands each expert to whoever computes with it, on the device or on the CPU.

mod cache;
mod costs;
mod counts;
mod device;
mod double;
mod links;
mod record;
mod shelves;
mod tier;

use std::collections::VecDeque;

use larder_core::{CacheScope, Geometry, Presence, Residency};
use larder_policy::eviction::{Eviction, Key, Setting, Step};

pub use cache::{TieredCache, Wanted, Work};
pub use costs::{Costs, Measured, Side};
pub use counts::{TierCounts, TierTraffic};
pub use device::{Device, DeviceError, Direction, Transfer, Transferred};
pub use double::{Begun, DeviceDouble, DeviceSlots};
pub use links::{Cause, Supply, TierError};

use crate::cache::Visit;
use crate::ledger::SlotIndex;
use record::Record;
use shelves::Shelves;
use tier::Place;

/// How many slots each tier has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierSetting {
    /// Of the device.
    pub device: Setting,
    /// In memory; its scratch slots are those in which experts pass through.
    pub host: Setting,
}

impl TierSetting {
    /// For a model of this geometry: slots of each pool on the device and in memory, and slots in memory that all pools
    /// share for what passes through.
    ///
    /// Without slots in memory all that is kept is on the device, and guesses are read into those for what passes
    /// through.
    pub fn new(geometry: &Geometry, scope: CacheScope, device_slots: usize, host_slots: usize, passing: usize) -> Self {
        let all = Setting::new(geometry, 0, scope);
        let slots = |slots: usize, scratch| Setting { slots: slots.min(all.keys()), scratch, ..all };
        TierSetting { device: slots(device_slots, 0), host: slots(host_slots, passing) }
    }

    /// What policies are made for that rank both tiers.
    pub fn policies(&self) -> Setting {
        let slots = (self.device.slots + self.host.slots).min(self.host.keys());
        Setting { slots, ..self.host }
    }
}

/// Where an expert can be computed from, if at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Whereabouts {
    /// In a slot of the device.
    Device(SlotIndex),
    /// In a slot in memory.
    Host(SlotIndex),
    /// Being read or copied.
    Moving,
    /// On the SSD alone.
    Absent,
}

/// Why an expert is to go to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// It is to be computed there.
    Wanted,
    /// The link would idle: it goes only if it ranks better than somebody who is there.
    Idle,
}

/// An expert goes to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Promotion {
    /// Its slot in memory.
    pub from: SlotIndex,
    /// Its slot of the device.
    pub to: SlotIndex,
    /// Who has to be copied out of that slot first.
    pub demotion: Option<Demotion>,
}

/// An expert leaves the device for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Demotion {
    /// Its layer, among those with experts.
    pub row: usize,
    /// Which expert.
    pub expert: usize,
    /// Its slot in memory.
    pub to: SlotIndex,
}

/// Every expert of every row, and the slots of both tiers.
///
/// An expert that was copied to the device stays in memory as well while nobody needs the room. Where somebody does,
/// those who are in both tiers leave memory first, as that loses nothing.
pub struct Tiers {
    shelves: Shelves,
    policies: Vec<Box<dyn Eviction>>,
    /// Who was read on a guess to where experts only pass through, and was not wanted since; the oldest first.
    strays: VecDeque<usize>,
    record: Record,
}

impl Tiers {
    /// The caller guarantees one policy for each pool, made for [`TierSetting::policies`], at least one slot on the
    /// device for each pool, and one for what passes through.
    pub fn new(setting: &TierSetting, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert_eq!(policies.len(), setting.host.pools(), "one policy per pool");
        assert!(setting.device.slots > 0 && setting.host.scratch > 0, "no way to the device");
        let experts = setting.host.rows * setting.host.experts;
        Tiers { shelves: Shelves::new(setting), policies, strays: VecDeque::new(), record: Record::new(experts) }
    }

    /// What happened so far.
    pub fn counts(&self) -> TierCounts {
        self.record.counts
    }

    /// What the last layer that has chosen found, and who left both tiers since.
    pub fn last_visit(&self) -> &Visit {
        &self.record.visit
    }

    /// What its policies were made for.
    pub fn setting(&self) -> TierSetting {
        TierSetting { device: self.shelves.device.setting, host: self.shelves.host.setting }
    }

    /// Whether memory keeps experts, not only those that pass through.
    pub fn keeps_in_memory(&self) -> bool {
        self.shelves.host.setting.slots > 0
    }

    /// Lets other policies say who leaves from now on, as [`Ledger::set_policies`](crate::Ledger::set_policies).
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        assert_eq!(policies.len(), self.policies.len(), "one policy per pool");
        for (policy, mut next) in self.policies.iter_mut().zip(policies) {
            while let Some(key) = policy.victim(&|_| true) {
                policy.forget(key);
                next.admit(key);
            }
            *policy = next;
        }
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        self.policies.iter_mut().for_each(|policy| policy.new_sequence());
    }

    /// Where an expert is.
    pub fn find(&self, row: usize, expert: usize) -> Whereabouts {
        let number = self.shelves.number(row, expert);
        match (self.shelves.device.place(number), self.shelves.host.place(number)) {
            (Place::There(slot), _) => Whereabouts::Device(slot),
            (Place::Absent, Place::There(slot)) => Whereabouts::Host(slot),
            (Place::Absent, Place::Absent) => Whereabouts::Absent,
            (Place::Busy(_), _) | (_, Place::Busy(_)) => Whereabouts::Moving,
        }
    }

    /// A layer has chosen: `wanted` are distinct and in order of rank, `logits` are those of its one token or empty.
    /// None of them leaves the tier that it is to be computed from until it is [`done`](Self::done), which the caller
    /// reports for each, computed or not.
    pub fn begin(&mut self, row: usize, wanted: &[usize], logits: &[f32]) {
        let pool = self.pool(row);
        self.policies[pool].begin(&Step { row, wanted, logits });
        self.record.visit.clear();
        for &expert in wanted {
            let number = self.shelves.number(row, expert);
            self.shelves.pinned[number] = true;
            let found = self.find(row, expert);
            self.record.wanted(number, expert, found);
            self.strays.retain(|stray| *stray != number);
            if found != Whereabouts::Absent {
                self.policies[pool].touch(self.shelves.host.setting.key(row, expert));
            }
        }
    }

    /// A slot in memory to read an absent expert into, if one can be had now. The caller reports
    /// [`arrived`](Self::arrived) or [`read_failed`](Self::read_failed).
    pub fn read(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        let free = self.shelves.host.take(row).or_else(|| self.room_to_pass());
        let slot = free.or_else(|| self.drop_copy(row))?;
        self.record.reads(self.shelves.number(row, expert), false);
        Some(self.admit(row, expert, slot))
    }

    /// A slot in memory to read an expert into before anybody wants it, if it is absent and such a slot can be had. The
    /// caller reports it like one that is wanted.
    pub fn guess(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        let number = self.shelves.number(row, expert);
        if self.find(row, expert) != Whereabouts::Absent || self.shelves.pinned[number] {
            return None;
        }
        let slot = match self.keeps_in_memory() {
            true => self.room_in_memory(row, number)?,
            false => {
                let slot = self.room_to_pass()?;
                self.strays.push_back(number);
                slot
            }
        };
        self.record.reads(number, true);
        Some(self.admit(row, expert, slot))
    }

    /// An expert has been read.
    pub fn arrived(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        self.shelves.host.settle(number);
    }

    /// An expert could not be read: its slot is free again.
    pub fn read_failed(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        let slot = self.shelves.host.leave(number);
        self.shelves.host.give_back(row, slot);
        self.forget(number);
    }

    /// Slots for an expert that is in memory alone and goes to the device, if it can. The caller copies the one who is
    /// demoted out before, and reports [`promoted`](Self::promoted) or [`promotion_failed`](Self::promotion_failed),
    /// and [`demoted`](Self::demoted) or [`demotion_failed`](Self::demotion_failed).
    pub fn promote(&mut self, row: usize, expert: usize, wish: Wish) -> Option<Promotion> {
        let Whereabouts::Host(from) = self.find(row, expert) else { return None };
        let number = self.shelves.number(row, expert);
        let (to, victim) = match self.shelves.device.take(row) {
            Some(free) => (free, None),
            None => {
                let runs = wish == Wish::Idle;
                let victim = self.worst(row, |s, n| s.can_leave_device(n) || (runs && n == number))?;
                if victim == number {
                    return None;
                }
                (self.shelves.device.leave(victim), Some(victim))
            }
        };
        self.shelves.device.expect(number, to);
        self.shelves.host.lend(number).expect("it is in memory");
        self.record.counts.promotions += 1;
        let demotion = victim.and_then(|victim| self.demote(row, victim));
        Some(Promotion { from, to, demotion })
    }

    /// An expert has been copied to the device.
    pub fn promoted(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        self.shelves.device.settle(number);
        self.shelves.host.settle(number);
    }

    /// An expert could not be copied to the device: it is in memory as before.
    pub fn promotion_failed(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        let slot = self.shelves.device.leave(number);
        self.shelves.device.give_back(row, slot);
        self.shelves.host.settle(number);
    }

    /// An expert has been copied out of the device.
    pub fn demoted(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        self.shelves.host.settle(number);
    }

    /// An expert could not be copied out of the device: it is on the SSD alone.
    pub fn demotion_failed(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        self.leave_memory(number);
    }

    /// An expert that was wanted has been computed, or is given up. If it passed through, somebody leaves memory for it
    /// who ranks worse, or it does. The caller guarantees that it is not moving.
    pub fn done(&mut self, row: usize, expert: usize) {
        let number = self.shelves.number(row, expert);
        self.shelves.pinned[number] = false;
        let Place::There(slot) = self.shelves.host.place(number) else { return };
        if !self.shelves.host.is_passing(slot) {
            return;
        }
        if !self.keeps_in_memory() {
            return self.leave_memory(number);
        }
        if let Some(free) = self.shelves.host.take(row) {
            self.shelves.host.exchange(slot, free);
            return self.shelves.host.give_back(row, free);
        }
        let copy = self.worst(row, |s, n| s.is_copy(n) || (n == number && s.device.has(n)));
        let leaves = copy.or_else(|| self.victim(row, |s, n| s.can_leave_memory(n) || n == number));
        let leaves = leaves.expect("at least it can leave itself");
        if leaves != number {
            let Place::There(instead) = self.shelves.host.place(leaves) else { unreachable!("nobody touches it") };
            self.shelves.host.exchange(slot, instead);
        }
        self.leave_memory(leaves);
    }

    /// Where an expert goes that has left the device: it is still in memory, is to be copied there, or is lost.
    fn demote(&mut self, row: usize, victim: usize) -> Option<Demotion> {
        if self.shelves.host.has(victim) {
            self.record.counts.kept += 1;
            return None;
        }
        let Some(to) = self.room_in_memory(row, victim) else {
            self.lose(victim);
            return None;
        };
        self.record.counts.demotions += 1;
        self.shelves.host.expect(victim, to);
        let experts = self.shelves.host.setting.experts;
        Some(Demotion { row: victim / experts, expert: victim % experts, to })
    }

    /// A slot in memory for an expert that is in no tier, unless it ranks worst.
    fn room_in_memory(&mut self, row: usize, number: usize) -> Option<SlotIndex> {
        if !self.keeps_in_memory() {
            return None;
        }
        if let Some(slot) = self.shelves.host.take(row).or_else(|| self.drop_copy(row)) {
            return Some(slot);
        }
        let leaves = self.victim(row, |s, n| s.can_leave_memory(n) || n == number)?;
        if leaves == number {
            return None;
        }
        let slot = self.shelves.host.leave(leaves);
        self.lose(leaves);
        Some(slot)
    }

    /// A slot for what passes through: a free one, or that of the oldest whom nobody wanted.
    fn room_to_pass(&mut self) -> Option<SlotIndex> {
        let free = self.shelves.host.take_passing();
        free.or_else(|| {
            let stray = *self.strays.iter().find(|stray| self.shelves.host.has(**stray))?;
            self.strays.retain(|other| *other != stray);
            self.leave_memory(stray);
            self.shelves.host.take_passing()
        })
    }

    /// The slot in memory of an expert of the row's pool that is on the device as well, if there is one.
    fn drop_copy(&mut self, row: usize) -> Option<SlotIndex> {
        let copy = self.worst(row, Shelves::is_copy)?;
        Some(self.shelves.host.leave(copy))
    }

    /// An expert's slot in memory is free from now on.
    fn leave_memory(&mut self, number: usize) {
        let slot = self.shelves.host.leave(number);
        let row = number / self.shelves.host.setting.experts;
        self.shelves.host.give_back(row, slot);
        if self.shelves.device.place(number) == Place::Absent {
            self.lose(number);
        }
    }

    /// An absent expert comes into a slot in memory.
    fn admit(&mut self, row: usize, expert: usize, slot: SlotIndex) -> SlotIndex {
        let number = self.shelves.number(row, expert);
        self.shelves.host.expect(number, slot);
        let pool = self.pool(row);
        self.policies[pool].admit(self.shelves.host.setting.key(row, expert));
        slot
    }

    /// An expert has left both tiers.
    fn lose(&mut self, number: usize) {
        let experts = self.shelves.host.setting.experts;
        self.record.lost(number / experts, number % experts);
        self.forget(number);
    }

    /// An expert is in no tier any more, or has not come into any.
    fn forget(&mut self, number: usize) {
        let setting = self.shelves.host.setting;
        let (row, expert) = (number / setting.experts, number % setting.experts);
        self.record.gone(number);
        self.strays.retain(|stray| *stray != number);
        self.policies[setting.pool(row)].forget(setting.key(row, expert));
    }

    /// Who of the row's pool ranks worst among those for which `fits` holds, and stays in one tier.
    fn worst(&mut self, row: usize, fits: impl Fn(&Shelves, usize) -> bool) -> Option<usize> {
        self.pick(row, fits, |policy, evictable| policy.worst(evictable))
    }

    /// Who of the row's pool leaves both tiers, among those for which `fits` holds. The caller loses it.
    fn victim(&mut self, row: usize, fits: impl Fn(&Shelves, usize) -> bool) -> Option<usize> {
        self.pick(row, fits, |policy, evictable| policy.victim(evictable))
    }

    fn pick(
        &mut self,
        row: usize,
        fits: impl Fn(&Shelves, usize) -> bool,
        ask: impl FnOnce(&mut dyn Eviction, &dyn Fn(Key) -> bool) -> Option<Key>,
    ) -> Option<usize> {
        let shelves = &self.shelves;
        let setting = shelves.host.setting;
        let pool = setting.pool(row);
        let number = |key| {
            let (row, expert) = setting.at(pool, key);
            shelves.number(row, expert)
        };
        ask(self.policies[pool].as_mut(), &|key| fits(shelves, number(key))).map(number)
    }

    fn pool(&self, row: usize) -> usize {
        self.shelves.host.setting.pool(row)
    }
}

impl Residency for Tiers {
    fn presence(&self, row: usize, expert: usize) -> Presence {
        match self.find(row, expert) {
            Whereabouts::Device(_) | Whereabouts::Host(_) => Presence::Resident,
            Whereabouts::Moving => Presence::InFlight,
            Whereabouts::Absent => Presence::Absent,
        }
    }
}

#[cfg(test)]
mod tests;
