//! The ledgers of both tiers beside each other, and who may leave which.

use super::TierShape;
use super::tier::{Tier, TierState};

/// Both tiers, and who is wanted.
pub(super) struct TierPair {
    /// Slots of the device.
    pub device: Tier,
    /// Slots in memory.
    pub host: Tier,
    /// Of each expert, whether it is wanted and not done.
    pub pinned: Vec<bool>,
}

impl TierPair {
    /// Nobody is anywhere.
    pub fn new(shape: &TierShape) -> Self {
        let (device, host) = (Tier::new(&shape.device), Tier::new(&shape.host));
        TierPair { device, host, pinned: vec![false; shape.host.rows * shape.host.experts] }
    }

    /// An expert's number among all.
    pub fn index(&self, row: usize, expert: usize) -> usize {
        self.host.index(row, expert)
    }

    /// Whether an expert is on the device and nobody wants it there.
    pub fn can_leave_device(&self, index: usize) -> bool {
        self.device.is_resident(index) && !self.pinned[index]
    }

    /// Whether an expert has a slot in memory that it does not need, as it is on the device as well.
    pub fn has_redundant_copy(&self, index: usize) -> bool {
        self.device.is_resident(index) && self.is_cached_in_host(index)
    }

    /// Whether an expert is in memory alone and nobody wants it.
    pub fn can_leave_host(&self, index: usize) -> bool {
        self.device.state(index) == TierState::Absent && !self.pinned[index] && self.is_cached_in_host(index)
    }

    /// Whether an expert is in memory, in a slot that its pool keeps.
    fn is_cached_in_host(&self, index: usize) -> bool {
        matches!(self.host.state(index), TierState::Resident(slot) if !self.host.is_scratch(slot))
    }
}
