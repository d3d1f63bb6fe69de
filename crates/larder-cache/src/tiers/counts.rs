use std::time::Duration;

/// What happened in two tiers so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierCounts {
    /// Experts that were on the device when they were wanted.
    pub device_hits: u64,
    /// Experts that were in memory alone.
    pub host_hits: u64,
    /// Experts that were being copied.
    pub awaited: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Experts that went to the device.
    pub promotions: u64,
    /// Experts that left the device and were copied to memory.
    pub demotions: u64,
    /// Experts that left the device and were in memory anyway.
    pub kept: u64,
    /// Experts that left both tiers, or did not reach the first.
    pub lost: u64,
}

impl TierCounts {
    /// Experts that were wanted.
    pub fn wanted(&self) -> u64 {
        self.device_hits + self.host_hits + self.awaited + self.misses
    }
}

/// What passed through two tiers so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierTraffic {
    /// What the tiers counted.
    pub counts: TierCounts,
    /// Experts that were computed on the device.
    pub on_device: u64,
    /// Experts that were computed on the CPU.
    pub on_host: u64,
    /// Bytes read from the SSD.
    pub read_bytes: u64,
    /// Bytes copied to the device.
    pub in_bytes: u64,
    /// Bytes copied out of the device.
    pub out_bytes: u64,
    /// Time in which the link was busy with copies to the device.
    pub in_busy: Duration,
    /// Time in which the link was busy with copies out of the device.
    pub out_busy: Duration,
    /// Copies that failed.
    pub failed_copies: u64,
    /// Time in which nothing could be computed because nothing had arrived.
    pub waited: Duration,
}
