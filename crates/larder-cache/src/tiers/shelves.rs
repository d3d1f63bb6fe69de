//! The ledgers of both tiers beside each other, and who may leave which.

use super::TierSetting;
use super::tier::{Place, Tier};

/// Both tiers, and who is wanted.
pub(super) struct Shelves {
    /// Slots of the device.
    pub device: Tier,
    /// Slots in memory.
    pub host: Tier,
    /// Of each expert, whether it is wanted and not done.
    pub pinned: Vec<bool>,
}

impl Shelves {
    /// Nobody is anywhere.
    pub fn new(setting: &TierSetting) -> Self {
        let (device, host) = (Tier::new(&setting.device), Tier::new(&setting.host));
        Shelves { device, host, pinned: vec![false; setting.host.rows * setting.host.experts] }
    }

    /// An expert's number among all.
    pub fn number(&self, row: usize, expert: usize) -> usize {
        self.host.number(row, expert)
    }

    /// Whether an expert is on the device and nobody wants it there.
    pub fn can_leave_device(&self, number: usize) -> bool {
        self.device.has(number) && !self.pinned[number]
    }

    /// Whether an expert has a slot in memory that it does not need, as it is on the device as well.
    pub fn is_copy(&self, number: usize) -> bool {
        self.device.has(number) && self.stays_in_memory(number)
    }

    /// Whether an expert is in memory alone and nobody wants it.
    pub fn can_leave_memory(&self, number: usize) -> bool {
        self.device.place(number) == Place::Absent && !self.pinned[number] && self.stays_in_memory(number)
    }

    /// Whether an expert is in memory, in a slot that its pool keeps.
    fn stays_in_memory(&self, number: usize) -> bool {
        matches!(self.host.place(number), Place::There(slot) if !self.host.is_passing(slot))
    }
}
