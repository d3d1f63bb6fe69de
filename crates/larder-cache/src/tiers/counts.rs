use std::ops::{Add, Sub};
use std::time::Duration;

use crate::ledger::Counts;
use crate::traffic::Traffic;

/// What happened in two tiers so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierCounts {
    /// Experts that were on the device when they were wanted.
    pub device_hits: u64,
    /// Experts that were in memory alone.
    pub host_hits: u64,
    /// Experts that were being copied, or read on a guess.
    pub awaited: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Misses of experts that had been read before.
    pub rereads: u64,
    /// Experts that went to the device.
    pub promotions: u64,
    /// Experts that left the device and were copied to memory.
    pub demotions: u64,
    /// Experts that left the device and were in memory anyway.
    pub kept: u64,
    /// Experts that left both tiers.
    pub lost: u64,
    /// Experts read on a guess.
    pub guesses: u64,
    /// Guesses that were wanted before they left again.
    pub useful: u64,
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
    /// Bytes read from the SSD because they were wanted.
    pub read_bytes: u64,
    /// Bytes read from the SSD on a guess.
    pub guessed_bytes: u64,
    /// Time in which reads were under way, as far as the cache saw.
    pub read_busy: Duration,
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
    /// Time spent computing experts; of what the device computes beside other things, that in which others waited for it.
    pub computed: Duration,
}

impl Add for TierCounts {
    type Output = TierCounts;

    fn add(self, other: TierCounts) -> TierCounts {
        TierCounts {
            device_hits: self.device_hits + other.device_hits,
            host_hits: self.host_hits + other.host_hits,
            awaited: self.awaited + other.awaited,
            misses: self.misses + other.misses,
            rereads: self.rereads + other.rereads,
            promotions: self.promotions + other.promotions,
            demotions: self.demotions + other.demotions,
            kept: self.kept + other.kept,
            lost: self.lost + other.lost,
            guesses: self.guesses + other.guesses,
            useful: self.useful + other.useful,
        }
    }
}

impl Add for TierTraffic {
    type Output = TierTraffic;

    fn add(self, other: TierTraffic) -> TierTraffic {
        TierTraffic {
            counts: self.counts + other.counts,
            on_device: self.on_device + other.on_device,
            on_host: self.on_host + other.on_host,
            read_bytes: self.read_bytes + other.read_bytes,
            guessed_bytes: self.guessed_bytes + other.guessed_bytes,
            read_busy: self.read_busy + other.read_busy,
            in_bytes: self.in_bytes + other.in_bytes,
            out_bytes: self.out_bytes + other.out_bytes,
            in_busy: self.in_busy + other.in_busy,
            out_busy: self.out_busy + other.out_busy,
            failed_copies: self.failed_copies + other.failed_copies,
            waited: self.waited + other.waited,
            computed: self.computed + other.computed,
        }
    }
}

impl Sub for TierCounts {
    type Output = TierCounts;

    /// What happened between two looks.
    fn sub(self, then: TierCounts) -> TierCounts {
        TierCounts {
            device_hits: self.device_hits - then.device_hits,
            host_hits: self.host_hits - then.host_hits,
            awaited: self.awaited - then.awaited,
            misses: self.misses - then.misses,
            rereads: self.rereads - then.rereads,
            promotions: self.promotions - then.promotions,
            demotions: self.demotions - then.demotions,
            kept: self.kept - then.kept,
            lost: self.lost - then.lost,
            guesses: self.guesses - then.guesses,
            useful: self.useful - then.useful,
        }
    }
}

impl Sub for TierTraffic {
    type Output = TierTraffic;

    /// What passed between two looks.
    fn sub(self, then: TierTraffic) -> TierTraffic {
        TierTraffic {
            counts: self.counts - then.counts,
            on_device: self.on_device - then.on_device,
            on_host: self.on_host - then.on_host,
            read_bytes: self.read_bytes - then.read_bytes,
            guessed_bytes: self.guessed_bytes - then.guessed_bytes,
            read_busy: self.read_busy - then.read_busy,
            in_bytes: self.in_bytes - then.in_bytes,
            out_bytes: self.out_bytes - then.out_bytes,
            in_busy: self.in_busy - then.in_busy,
            out_busy: self.out_busy - then.out_busy,
            failed_copies: self.failed_copies - then.failed_copies,
            waited: self.waited - then.waited,
            computed: self.computed - then.computed,
        }
    }
}

/// Both tiers seen as one: a hit is a hit in either, and who leaves both is evicted.
impl From<TierTraffic> for Traffic {
    fn from(tiers: TierTraffic) -> Traffic {
        let TierCounts { device_hits, host_hits, awaited, misses, rereads, lost, guesses, useful, .. } = tiers.counts;
        let hits = device_hits + host_hits;
        Traffic {
            counts: Counts { hits, misses, evictions: lost, rereads, awaited, guesses, useful },
            demanded: tiers.read_bytes,
            guessed: tiers.guessed_bytes,
            waited: tiers.waited,
            computed: tiers.computed,
            busy: tiers.read_busy,
            tiers: Some(tiers),
        }
    }
}
