//! Two tiers of slots over the SSD: those of a device with memory of its own, and those in memory below it.
//!
//! [`TierLedger`] says which expert is where and who moves; it moves no bytes. Each tier has a ledger of its own, and one
//! policy per pool ranks all that are in either. The [`TieredCache`] moves the bytes: it asks the tiers, submits reads
//! and copies, and hands each expert to whoever computes with it, on the device or on the CPU.

mod cache;
mod costs;
mod counts;
mod device;
mod double;
mod links;
mod record;
mod tier;
mod tier_pair;

use std::collections::VecDeque;

use larder_core::{CacheScope, Geometry, Presence, Residency};
use larder_policy::eviction::{CacheShape, Eviction, Key, LayerChoice};

pub use cache::{TieredCache, TieredCompute, WantedExpert};
pub use costs::{CostModel, MeasuredCosts, Side};
pub use counts::{TierCounts, TierTraffic};
pub use device::{Device, DeviceError, Direction, Transfer, TransferDone};
pub use double::{DeviceDouble, DeviceSlots, PendingCompute};
pub use links::{HostTier, TierError, TierErrorCause};

use crate::cache::Visit;
use crate::ledger::SlotIndex;
use record::VisitRecord;
use tier::TierState;
use tier_pair::TierPair;

/// How many slots each tier has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierShape {
    /// Of the device.
    pub device: CacheShape,
    /// In memory; its scratch slots are those in which experts pass through.
    pub host: CacheShape,
}

impl TierShape {
    /// For a model of this geometry: slots of each pool on the device and in memory, and slots in memory that all pools
    /// share for what passes through.
    ///
    /// Without slots in memory all that is kept is on the device, and guesses are read into those for what passes
    /// through.
    pub fn new(geometry: &Geometry, scope: CacheScope, device_slots: usize, host_slots: usize, scratch: usize) -> Self {
        let all = CacheShape::new(geometry, 0, scope);
        let slots = |slots: usize, scratch| CacheShape { slots: slots.min(all.keys_per_pool()), scratch, ..all };
        TierShape { device: slots(device_slots, 0), host: slots(host_slots, scratch) }
    }

    /// What policies are made for that rank both tiers.
    pub fn policy_shape(&self) -> CacheShape {
        let slots = (self.device.slots + self.host.slots).min(self.host.keys_per_pool());
        CacheShape { slots, ..self.host }
    }
}

/// Where an expert can be computed from, if at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertLocation {
    /// In a slot of the device.
    Device(SlotIndex),
    /// In a slot in memory.
    Host(SlotIndex),
    /// Being read or copied.
    InFlight,
    /// On the SSD alone.
    Absent,
}

/// Why an expert is to go to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromoteFor {
    /// It is to be computed there.
    Demand,
    /// The link would idle: it goes only if it ranks better than somebody who is there.
    IdleLink,
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
pub struct TierLedger {
    pair: TierPair,
    policies: Vec<Box<dyn Eviction>>,
    /// Who was read on a guess to where experts only pass through, and was not wanted since; the oldest first.
    unused_prefetches: VecDeque<usize>,
    record: VisitRecord,
}

impl TierLedger {
    /// The caller guarantees one policy for each pool, made for [`TierShape::policy_shape`], at least one slot on the
    /// device for each pool, and one for what passes through.
    pub fn new(shape: &TierShape, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert_eq!(policies.len(), shape.host.pools(), "one policy per pool");
        assert!(shape.device.slots > 0 && shape.host.scratch > 0, "no way to the device");
        let experts = shape.host.rows * shape.host.experts;
        TierLedger {
            pair: TierPair::new(shape),
            policies,
            unused_prefetches: VecDeque::new(),
            record: VisitRecord::new(experts),
        }
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
    pub fn shape(&self) -> TierShape {
        TierShape { device: self.pair.device.shape, host: self.pair.host.shape }
    }

    /// Whether memory keeps experts, not only those that pass through.
    pub fn has_host_cache(&self) -> bool {
        self.pair.host.shape.slots > 0
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
    pub fn locate(&self, row: usize, expert: usize) -> ExpertLocation {
        let index = self.pair.index(row, expert);
        match (self.pair.device.state(index), self.pair.host.state(index)) {
            (TierState::Resident(slot), _) => ExpertLocation::Device(slot),
            (TierState::Absent, TierState::Resident(slot)) => ExpertLocation::Host(slot),
            (TierState::Absent, TierState::Absent) => ExpertLocation::Absent,
            (TierState::InFlight(_), _) | (_, TierState::InFlight(_)) => ExpertLocation::InFlight,
        }
    }

    /// A layer has chosen: `wanted` are distinct and in order of rank, `logits` are those of its one token or empty.
    /// None of them leaves the tier that it is to be computed from until it is [`unpin`](Self::unpin), which the caller
    /// reports for each, computed or not.
    pub fn begin(&mut self, row: usize, wanted: &[usize], logits: &[f32]) {
        let pool = self.pool(row);
        self.policies[pool].begin(&LayerChoice { row, wanted, logits });
        self.record.visit.clear();
        for &expert in wanted {
            let index = self.pair.index(row, expert);
            self.pair.pinned[index] = true;
            let found = self.locate(row, expert);
            self.record.wanted(index, expert, found);
            self.unused_prefetches.retain(|unused| *unused != index);
            if found != ExpertLocation::Absent {
                self.policies[pool].touch(self.pair.host.shape.key(row, expert));
            }
        }
    }

    /// A slot in memory to read an absent expert into, if one can be had now. The caller reports
    /// [`arrived`](Self::arrived) or [`read_failed`](Self::read_failed).
    pub fn read(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        let free = self.pair.host.take_free(row).or_else(|| self.find_scratch_slot());
        let slot = free.or_else(|| self.drop_host_copy(row))?;
        self.record.read_begins(self.pair.index(row, expert), false);
        Some(self.admit(row, expert, slot))
    }

    /// A slot in memory to read an expert into before anybody wants it, if it is absent and such a slot can be had. The
    /// caller reports it like one that is wanted.
    pub fn prefetch(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        let index = self.pair.index(row, expert);
        if self.locate(row, expert) != ExpertLocation::Absent || self.pair.pinned[index] {
            return None;
        }
        let slot = match self.has_host_cache() {
            true => self.find_host_slot(row, index)?,
            false => {
                let slot = self.find_scratch_slot()?;
                self.unused_prefetches.push_back(index);
                slot
            }
        };
        self.record.read_begins(index, true);
        Some(self.admit(row, expert, slot))
    }

    /// An expert has been read.
    pub fn arrived(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        self.pair.host.mark_resident(index);
    }

    /// An expert could not be read: its slot is free again.
    pub fn read_failed(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        let slot = self.pair.host.remove(index);
        self.pair.host.release(row, slot);
        self.forget(index);
    }

    /// Slots for an expert that is in memory alone and goes to the device, if it can. The caller copies the one who is
    /// demoted out before, and reports [`promoted`](Self::promoted) or [`promotion_failed`](Self::promotion_failed),
    /// and [`demoted`](Self::demoted) or [`demotion_failed`](Self::demotion_failed).
    pub fn promote(&mut self, row: usize, expert: usize, reason: PromoteFor) -> Option<Promotion> {
        let ExpertLocation::Host(from) = self.locate(row, expert) else { return None };
        let index = self.pair.index(row, expert);
        let (to, victim) = match self.pair.device.take_free(row) {
            Some(free) => (free, None),
            None => {
                let runs = reason == PromoteFor::IdleLink;
                let victim = self.worst(row, |s, n| s.can_leave_device(n) || (runs && n == index))?;
                if victim == index {
                    return None;
                }
                (self.pair.device.remove(victim), Some(victim))
            }
        };
        self.pair.device.begin_arrival(index, to);
        self.pair.host.begin_copy(index).expect("it is in memory");
        self.record.counts.promotions += 1;
        let demotion = victim.and_then(|victim| self.demote(row, victim));
        Some(Promotion { from, to, demotion })
    }

    /// An expert has been copied to the device.
    pub fn promoted(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        self.pair.device.mark_resident(index);
        self.pair.host.mark_resident(index);
    }

    /// An expert could not be copied to the device: it is in memory as before.
    pub fn promotion_failed(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        let slot = self.pair.device.remove(index);
        self.pair.device.release(row, slot);
        self.pair.host.mark_resident(index);
    }

    /// An expert has been copied out of the device.
    pub fn demoted(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        self.pair.host.mark_resident(index);
    }

    /// An expert could not be copied out of the device: it is on the SSD alone.
    pub fn demotion_failed(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        self.remove_from_host(index);
    }

    /// An expert that was wanted has been computed, or is given up. If it passed through, somebody leaves memory for it
    /// who ranks worse, or it does. The caller guarantees that it is not moving.
    pub fn unpin(&mut self, row: usize, expert: usize) {
        let index = self.pair.index(row, expert);
        self.pair.pinned[index] = false;
        let TierState::Resident(slot) = self.pair.host.state(index) else { return };
        if !self.pair.host.is_scratch(slot) {
            return;
        }
        if !self.has_host_cache() {
            return self.remove_from_host(index);
        }
        if let Some(free) = self.pair.host.take_free(row) {
            self.pair.host.swap_scratch(slot, free);
            return self.pair.host.release(row, free);
        }
        let copy = self.worst(row, |s, n| s.has_redundant_copy(n) || (n == index && s.device.is_resident(n)));
        let leaves = copy.or_else(|| self.victim(row, |s, n| s.can_leave_host(n) || n == index));
        let leaves = leaves.expect("at least it can leave itself");
        if leaves != index {
            let TierState::Resident(instead) = self.pair.host.state(leaves) else { unreachable!("nobody touches it") };
            self.pair.host.swap_scratch(slot, instead);
        }
        self.remove_from_host(leaves);
    }

    /// Where an expert goes that has left the device: it is still in memory, is to be copied there, or is lost.
    fn demote(&mut self, row: usize, victim: usize) -> Option<Demotion> {
        if self.pair.host.is_resident(victim) {
            self.record.counts.free_demotions += 1;
            return None;
        }
        let Some(to) = self.find_host_slot(row, victim) else {
            self.evict(victim);
            return None;
        };
        self.record.counts.demotions += 1;
        self.pair.host.begin_arrival(victim, to);
        let experts = self.pair.host.shape.experts;
        Some(Demotion { row: victim / experts, expert: victim % experts, to })
    }

    /// A slot in memory for an expert that is in no tier, unless it ranks worst.
    fn find_host_slot(&mut self, row: usize, index: usize) -> Option<SlotIndex> {
        if !self.has_host_cache() {
            return None;
        }
        if let Some(slot) = self.pair.host.take_free(row).or_else(|| self.drop_host_copy(row)) {
            return Some(slot);
        }
        let leaves = self.victim(row, |s, n| s.can_leave_host(n) || n == index)?;
        if leaves == index {
            return None;
        }
        let slot = self.pair.host.remove(leaves);
        self.evict(leaves);
        Some(slot)
    }

    /// A slot for what passes through: a free one, or that of the oldest whom nobody wanted.
    fn find_scratch_slot(&mut self) -> Option<SlotIndex> {
        let free = self.pair.host.take_scratch();
        free.or_else(|| {
            let unused = *self.unused_prefetches.iter().find(|unused| self.pair.host.is_resident(**unused))?;
            self.unused_prefetches.retain(|other| *other != unused);
            self.remove_from_host(unused);
            self.pair.host.take_scratch()
        })
    }

    /// The slot in memory of an expert of the row's pool that is on the device as well, if there is one.
    fn drop_host_copy(&mut self, row: usize) -> Option<SlotIndex> {
        let copy = self.worst(row, TierPair::has_redundant_copy)?;
        Some(self.pair.host.remove(copy))
    }

    /// An expert's slot in memory is free from now on.
    fn remove_from_host(&mut self, index: usize) {
        let slot = self.pair.host.remove(index);
        let row = index / self.pair.host.shape.experts;
        self.pair.host.release(row, slot);
        if self.pair.device.state(index) == TierState::Absent {
            self.evict(index);
        }
    }

    /// An absent expert comes into a slot in memory.
    fn admit(&mut self, row: usize, expert: usize, slot: SlotIndex) -> SlotIndex {
        let index = self.pair.index(row, expert);
        self.pair.host.begin_arrival(index, slot);
        let pool = self.pool(row);
        self.policies[pool].admit(self.pair.host.shape.key(row, expert));
        slot
    }

    /// An expert has left both tiers.
    fn evict(&mut self, index: usize) {
        let experts = self.pair.host.shape.experts;
        self.record.evicted(index / experts, index % experts);
        self.forget(index);
    }

    /// An expert is in no tier any more, or has not come into any.
    fn forget(&mut self, index: usize) {
        let shape = self.pair.host.shape;
        let (row, expert) = (index / shape.experts, index % shape.experts);
        self.record.removed(index);
        self.unused_prefetches.retain(|unused| *unused != index);
        self.policies[shape.pool(row)].forget(shape.key(row, expert));
    }

    /// Who of the row's pool ranks worst among those for which `fits` holds, and stays in one tier.
    fn worst(&mut self, row: usize, eligible: impl Fn(&TierPair, usize) -> bool) -> Option<usize> {
        self.pick(row, eligible, |policy, evictable| policy.worst(evictable))
    }

    /// Who of the row's pool leaves both tiers, among those for which `fits` holds. The caller loses it.
    fn victim(&mut self, row: usize, eligible: impl Fn(&TierPair, usize) -> bool) -> Option<usize> {
        self.pick(row, eligible, |policy, evictable| policy.victim(evictable))
    }

    fn pick(
        &mut self,
        row: usize,
        eligible: impl Fn(&TierPair, usize) -> bool,
        rank: impl FnOnce(&mut dyn Eviction, &dyn Fn(Key) -> bool) -> Option<Key>,
    ) -> Option<usize> {
        let pair = &self.pair;
        let shape = pair.host.shape;
        let pool = shape.pool(row);
        let index = |key| {
            let (row, expert) = shape.row_and_expert(pool, key);
            pair.index(row, expert)
        };
        rank(self.policies[pool].as_mut(), &|key| eligible(pair, index(key))).map(index)
    }

    fn pool(&self, row: usize) -> usize {
        self.pair.host.shape.pool(row)
    }
}

impl Residency for TierLedger {
    fn presence(&self, row: usize, expert: usize) -> Presence {
        match self.locate(row, expert) {
            ExpertLocation::Device(_) | ExpertLocation::Host(_) => Presence::Resident,
            ExpertLocation::InFlight => Presence::InFlight,
            ExpertLocation::Absent => Presence::Absent,
        }
    }
}

#[cfg(test)]
mod tests;
