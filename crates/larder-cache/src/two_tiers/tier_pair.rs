//! The tables of both tiers side by side, and which experts may leave each.

use larder_core::ExpertKey;

use super::TierShape;
use super::tier::{Tier, TierState};

/// Both tiers, and the pins.
pub(super) struct TierPair {
    /// The slots of the device.
    pub device: Tier,
    /// The slots in memory.
    pub host: Tier,
    /// For each expert, whether it is wanted and not computed yet.
    pub pinned: Vec<bool>,
    /// For each expert, whether the next layer will probably want it.
    pub predicted: Vec<bool>,
}

impl TierPair {
    /// Two empty tiers.
    pub fn new(shape: &TierShape) -> Self {
        let (device, host) = (Tier::new(&shape.device), Tier::new(&shape.host));
        let [pinned, predicted] = [(); 2].map(|()| vec![false; shape.host.rows * shape.host.experts]);
        TierPair { device, host, pinned, predicted }
    }

    /// An expert's dense index among all.
    pub fn index(&self, expert: ExpertKey) -> usize {
        expert.index(self.host.shape.experts)
    }

    /// The expert at a dense index.
    pub fn expert(&self, index: usize) -> ExpertKey {
        ExpertKey::from_index(index, self.host.shape.experts)
    }

    /// Whether an expert is on the device and not pinned.
    pub fn can_leave_device(&self, index: usize) -> bool {
        self.device.is_resident(index) && !self.pinned[index]
    }

    /// Whether an expert has a host slot that it does not need, as it is on the device as well.
    pub fn has_redundant_copy(&self, index: usize) -> bool {
        self.device.is_resident(index) && self.is_cached_in_host(index)
    }

    /// Whether an expert is in memory only and not pinned.
    pub fn can_leave_host(&self, index: usize) -> bool {
        self.device.state(index) == TierState::Absent && !self.pinned[index] && self.is_cached_in_host(index)
    }

    /// Whether an expert is in a host slot of its pool, not in a scratch slot.
    fn is_cached_in_host(&self, index: usize) -> bool {
        matches!(self.host.state(index), TierState::Resident(slot) if !self.host.is_scratch(slot))
    }
}
