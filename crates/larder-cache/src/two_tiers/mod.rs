//! Two tiers of slots above the SSD: device memory, and main memory below it.
//!
//! [`TierLedger`] says where each expert is and which ones move; it moves no bytes. Each tier has a table of its own,
//! and one policy per pool ranks the experts of both tiers. The [`TieredCache`] moves the bytes: it asks the ledger,
//! submits reads and copies, and hands each expert to the caller for computing, on the device or on the CPU.

mod cache;
mod costs;
mod counts;
mod device;
mod fake;
mod links;
mod record;
mod tier;
mod tier_pair;
mod whole_rows;

use std::collections::VecDeque;

use larder_core::{CacheScope, ExpertKey, Geometry, MoeRow, Presence, Residency};
use larder_policy::eviction::{CacheShape, Eviction, LayerChoice};

pub use cache::{TieredCache, TieredCompute};
pub use costs::{CostModel, MeasuredCosts, Side};
pub use counts::{DeviceWork, TierCounts, TierTraffic};
pub use device::{Device, DeviceError, Direction, Transfer, TransferDone};
pub use fake::{DeviceSlots, FakeDevice, PendingCompute};
pub use links::{TierError, TierErrorCause};

use crate::one_tier::SlotIndex;
use crate::pools::PolicyPools;
use crate::visit::Visit;
use record::VisitRecord;
use tier::TierState;
use tier_pair::TierPair;
use whole_rows::WholeRow;

/// The slots of both tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierShape {
    /// Slots in device memory.
    pub device: CacheShape,
    /// Slots in main memory; experts pass through its scratch slots on their way to the device.
    pub host: CacheShape,
}

impl TierShape {
    /// For a model of this geometry: slots of each pool on the device and in memory, and scratch slots in memory that
    /// all pools share.
    ///
    /// Without host slots only the device keeps experts, and prefetches are read into scratch slots.
    pub fn new(geometry: &Geometry, scope: CacheScope, device_slots: usize, host_slots: usize, scratch: usize) -> Self {
        let all = CacheShape::new(geometry, 0, scope);
        let slots = |slots: usize, scratch| CacheShape { slots: slots.min(all.keys_per_pool()), scratch, ..all };
        TierShape { device: slots(device_slots, 0), host: slots(host_slots, scratch) }
    }

    /// The shape for which policies are made that rank both tiers.
    pub fn policy_shape(&self) -> CacheShape {
        let slots = (self.device.slots + self.host.slots).min(self.host.keys_per_pool());
        CacheShape { slots, ..self.host }
    }
}

/// Where an expert is, and whether it can be computed from there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertLocation {
    /// In a device slot.
    Device(SlotIndex),
    /// In a host slot only.
    Host(SlotIndex),
    /// Being read or copied.
    InFlight,
    /// On the SSD only.
    Absent,
}

/// Why an expert is promoted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromoteFor {
    /// It is to be computed on the device.
    Demand,
    /// The link is idle: the expert is promoted only if it ranks better than an expert on the device.
    IdleLink,
    /// The next layer will probably want it: it takes the place of an expert that is in memory too and not predicted.
    Prediction,
}

/// An expert is copied to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Promotion {
    /// Its host slot.
    pub from: SlotIndex,
    /// Its device slot.
    pub to: SlotIndex,
    /// The expert that has to be copied out of that device slot first.
    pub demotion: Option<Demotion>,
}

/// An expert is copied from the device to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Demotion {
    /// The expert.
    pub expert: ExpertKey,
    /// Its host slot.
    pub to: SlotIndex,
}

/// The location of every expert of every row, and the slots of both tiers.
///
/// An expert that was copied to the device stays in memory as well until its slot is needed. Such copies leave memory
/// first, as dropping them loses nothing.
pub struct TierLedger {
    pair: TierPair,
    policies: PolicyPools,
    /// Experts prefetched into scratch slots and not wanted since, the oldest first.
    unused_prefetches: VecDeque<usize>,
    record: VisitRecord,
}

impl TierLedger {
    /// The caller guarantees one policy for each pool, made for [`TierShape::policy_shape`], at least one slot on the
    /// device for each pool, and one scratch slot.
    pub fn new(shape: &TierShape, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert!(
            shape.device.slots > 0 && shape.host.scratch > 0,
            "each pool has a device slot, and there is a scratch slot"
        );
        let experts = shape.host.rows * shape.host.experts;
        TierLedger {
            pair: TierPair::new(shape),
            policies: PolicyPools::new(&shape.policy_shape(), policies),
            unused_prefetches: VecDeque::new(),
            record: VisitRecord::new(experts),
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> TierCounts {
        self.record.counts
    }

    /// What the last layer to choose found, and the experts evicted from both tiers since.
    pub fn last_visit(&self) -> &Visit {
        &self.record.visit
    }

    /// The shape that it was made for.
    pub fn shape(&self) -> TierShape {
        TierShape { device: self.pair.device.shape, host: self.pair.host.shape }
    }

    /// Whether memory keeps experts besides those in scratch slots.
    pub fn has_host_cache(&self) -> bool {
        self.pair.host.shape.slots > 0
    }

    /// Replaces the eviction policies, as [`Ledger::set_policies`](crate::Ledger::set_policies) does.
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.policies.replace(policies);
    }

    /// A new sequence begins, unrelated to the one before.
    pub fn new_sequence(&mut self) {
        self.policies.new_sequence();
    }

    /// The location of an expert.
    pub fn locate(&self, expert: ExpertKey) -> ExpertLocation {
        let index = self.pair.index(expert);
        match (self.pair.device.state(index), self.pair.host.state(index)) {
            (TierState::Resident(slot), _) => ExpertLocation::Device(slot),
            (TierState::Absent, TierState::Resident(slot)) => ExpertLocation::Host(slot),
            (TierState::Absent, TierState::Absent) => ExpertLocation::Absent,
            (TierState::InFlight(_), _) | (_, TierState::InFlight(_)) => ExpertLocation::InFlight,
        }
    }

    /// A layer has chosen. All wanted experts are pinned in the tier that they are to be computed from until
    /// [`unpin`](Self::unpin), which the caller calls for each, computed or not.
    pub fn begin(&mut self, choice: &LayerChoice) {
        self.count(choice, |tiers, expert| tiers.locate(expert));
        for &id in choice.wanted {
            let index = self.pair.index(choice.row.expert(id));
            self.pair.pinned[index] = true;
        }
    }

    /// Counts the wanted experts of a layer, and tells the policies.
    fn count(&mut self, choice: &LayerChoice, found: impl Fn(&Self, ExpertKey) -> ExpertLocation) {
        let LayerChoice { row, wanted, .. } = *choice;
        self.policies.begin(choice);
        self.record.visit.clear();
        for &id in wanted {
            let expert = row.expert(id);
            let (index, found) = (self.pair.index(expert), found(self, expert));
            self.record.wanted(index, id, found);
            self.unused_prefetches.retain(|unused| *unused != index);
            if self.locate(expert) != ExpertLocation::Absent {
                self.policies.touch(expert);
            }
        }
    }

    /// A host slot to read an absent expert into, if there is one now. The caller reports
    /// [`arrived`](Self::arrived) or [`read_failed`](Self::read_failed).
    pub fn read(&mut self, expert: ExpertKey) -> Option<SlotIndex> {
        let free = self.pair.host.take_free(expert.row).or_else(|| self.find_scratch_slot());
        let slot = free.or_else(|| self.drop_host_copy(expert.row))?;
        self.record.read_begins(self.pair.index(expert), false);
        Some(self.admit(expert, slot))
    }

    /// A host slot to prefetch an expert into, if it is absent and there is such a slot. The caller reports the read
    /// like a demand read.
    pub fn prefetch(&mut self, expert: ExpertKey) -> Option<SlotIndex> {
        let index = self.pair.index(expert);
        if self.locate(expert) != ExpertLocation::Absent || self.pair.pinned[index] {
            return None;
        }
        let slot = if self.has_host_cache() {
            self.find_host_slot(expert.row, index)?
        } else {
            let slot = self.find_scratch_slot()?;
            self.unused_prefetches.push_back(index);
            slot
        };
        self.record.read_begins(index, true);
        Some(self.admit(expert, slot))
    }

    /// A read has succeeded.
    pub fn arrived(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        self.pair.host.mark_resident(index);
    }

    /// A read has failed: the slot is free again.
    pub fn read_failed(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        let slot = self.pair.host.remove(index);
        self.pair.host.release(expert.row, slot);
        self.forget(index);
    }

    /// The experts that the next layer will probably want, in place of those before.
    pub fn predict(&mut self, experts: &[ExpertKey]) {
        self.pair.predicted.fill(false);
        for expert in experts {
            let index = self.pair.index(*expert);
            self.pair.predicted[index] = true;
        }
    }

    /// Slots for the promotion of an expert that is in memory only, if it is possible. The caller copies the demoted
    /// expert out first, and reports [`promoted`](Self::promoted) or [`promotion_failed`](Self::promotion_failed), and
    /// [`demoted`](Self::demoted) or [`demotion_failed`](Self::demotion_failed).
    pub fn promote(&mut self, expert: ExpertKey, reason: PromoteFor) -> Option<Promotion> {
        let ExpertLocation::Host(from) = self.locate(expert) else { return None };
        let index = self.pair.index(expert);
        let (to, victim) = match self.pair.device.take_free(expert.row) {
            Some(free) => (free, None),
            None => {
                let eligible = |s: &TierPair, n| match reason {
                    PromoteFor::Demand => s.can_leave_device(n),
                    PromoteFor::IdleLink => s.can_leave_device(n) || n == index,
                    PromoteFor::Prediction => s.can_leave_device(n) && s.has_redundant_copy(n) && !s.predicted[n],
                };
                let victim = self.worst(expert.row, eligible)?;
                if victim == index {
                    return None;
                }
                self.record.left_device(victim);
                (self.pair.device.remove(victim), Some(victim))
            }
        };
        self.pair.device.begin_arrival(index, to);
        self.pair.host.begin_copy(index).expect("the expert is in memory");
        self.record.copy_begins(index, reason == PromoteFor::Prediction);
        let demotion = victim.and_then(|victim| self.demote(expert.row, victim));
        Some(Promotion { from, to, demotion })
    }

    /// An expert has been copied to the device.
    pub fn promoted(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        self.pair.device.mark_resident(index);
        self.pair.host.mark_resident(index);
    }

    /// A copy to the device has failed: the expert is in memory as before.
    pub fn promotion_failed(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        let slot = self.pair.device.remove(index);
        self.record.left_device(index);
        self.pair.device.release(expert.row, slot);
        self.pair.host.mark_resident(index);
    }

    /// An expert has been copied out of the device.
    pub fn demoted(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        self.pair.host.mark_resident(index);
    }

    /// A copy out of the device has failed: the expert is on the SSD only.
    pub fn demotion_failed(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        self.remove_from_host(index);
    }

    /// A wanted expert has been computed or given up. If it is in a scratch slot, it takes the slot of an expert in
    /// memory that ranks worse, or leaves. The caller guarantees that it is not in flight.
    pub fn unpin(&mut self, expert: ExpertKey) {
        let index = self.pair.index(expert);
        self.pair.pinned[index] = false;
        let TierState::Resident(slot) = self.pair.host.state(index) else { return };
        if !self.pair.host.is_scratch(slot) {
            return;
        }
        if !self.has_host_cache() {
            return self.remove_from_host(index);
        }
        if let Some(free) = self.pair.host.take_free(expert.row) {
            self.pair.host.swap_scratch(slot, free);
            return self.pair.host.release(expert.row, free);
        }
        let copy = self.worst(expert.row, |s, n| s.has_redundant_copy(n) || (n == index && s.device.is_resident(n)));
        let leaves = copy.or_else(|| self.victim(expert.row, |s, n| s.can_leave_host(n) || n == index));
        let leaves = leaves.expect("at least the expert itself can leave");
        if leaves != index {
            let TierState::Resident(instead) = self.pair.host.state(leaves) else { unreachable!("no copy uses it") };
            self.pair.host.swap_scratch(slot, instead);
        }
        self.remove_from_host(leaves);
    }

    /// Demotes an expert that has left the device: it is still in memory, is to be copied there, or is evicted.
    fn demote(&mut self, row: MoeRow, victim: usize) -> Option<Demotion> {
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
        Some(Demotion { expert: self.pair.expert(victim), to })
    }

    /// A host slot for an expert that is in no tier; `None` if it ranks worst itself.
    fn find_host_slot(&mut self, row: MoeRow, index: usize) -> Option<SlotIndex> {
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

    /// A scratch slot: a free one, else that of the oldest unused prefetch.
    fn find_scratch_slot(&mut self) -> Option<SlotIndex> {
        let free = self.pair.host.take_scratch();
        free.or_else(|| {
            let unused = *self.unused_prefetches.iter().find(|unused| self.pair.host.is_resident(**unused))?;
            self.unused_prefetches.retain(|other| *other != unused);
            self.remove_from_host(unused);
            self.pair.host.take_scratch()
        })
    }

    /// Frees the host slot of an expert of the row's pool that is on the device as well, if there is one.
    fn drop_host_copy(&mut self, row: MoeRow) -> Option<SlotIndex> {
        let copy = self.worst(row, TierPair::has_redundant_copy)?;
        Some(self.pair.host.remove(copy))
    }

    /// Frees an expert's host slot.
    fn remove_from_host(&mut self, index: usize) {
        let slot = self.pair.host.remove(index);
        self.pair.host.release(self.pair.expert(index).row, slot);
        if self.pair.device.state(index) == TierState::Absent {
            self.evict(index);
        }
    }

    /// An absent expert is assigned a host slot.
    fn admit(&mut self, expert: ExpertKey, slot: SlotIndex) -> SlotIndex {
        let index = self.pair.index(expert);
        self.pair.host.begin_arrival(index, slot);
        self.policies.admit(expert);
        slot
    }

    /// An expert has left both tiers.
    fn evict(&mut self, index: usize) {
        self.record.evicted(self.pair.expert(index));
        self.forget(index);
    }

    /// An expert is in no tier any more, or its read has failed.
    fn forget(&mut self, index: usize) {
        self.record.removed(index);
        self.unused_prefetches.retain(|unused| *unused != index);
        self.policies.forget(self.pair.expert(index));
    }

    /// The worst-ranked expert of the row's pool among the `eligible` ones, when it stays in one of the tiers.
    fn worst(&mut self, row: MoeRow, eligible: impl Fn(&TierPair, usize) -> bool) -> Option<usize> {
        let pair = &self.pair;
        let found = self.policies.worst(row, |expert| eligible(pair, pair.index(expert)));
        found.map(|expert| pair.index(expert))
    }

    /// The victim of the row's pool among the `eligible` ones; the caller evicts it from both tiers.
    fn victim(&mut self, row: MoeRow, eligible: impl Fn(&TierPair, usize) -> bool) -> Option<usize> {
        let pair = &self.pair;
        let found = self.policies.victim(row, |expert| eligible(pair, pair.index(expert)));
        found.map(|expert| pair.index(expert))
    }
}

impl Residency for TierLedger {
    fn presence(&self, expert: ExpertKey) -> Presence {
        match self.locate(expert) {
            ExpertLocation::Device(_) | ExpertLocation::Host(_) => Presence::Resident,
            ExpertLocation::InFlight => Presence::InFlight,
            ExpertLocation::Absent => Presence::Absent,
        }
    }
}

#[cfg(test)]
mod tests;
