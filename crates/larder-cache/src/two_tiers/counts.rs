//! Counts and traffic of two tiers.

use std::time::Duration;

/// Counts of a tier ledger since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierCounts {
    /// Wanted experts that were on the device.
    pub device_hits: u64,
    /// Wanted experts that were in memory only.
    pub host_hits: u64,
    /// Wanted experts that were being copied or prefetched.
    pub in_flight_hits: u64,
    /// Wanted experts that had to be read.
    pub misses: u64,
    /// Misses of experts that had been read before.
    pub rereads: u64,
    /// Experts copied to the device, the ones in progress included.
    pub promotions: u64,
    /// Experts that left the device and were copied to memory.
    pub demotions: u64,
    /// Experts that left the device without a copy, as they were still in memory.
    pub free_demotions: u64,
    /// Experts that left both tiers.
    pub evictions: u64,
    /// Experts that were prefetched.
    pub prefetches: u64,
    /// Prefetched experts that were wanted before they were evicted.
    pub useful_prefetches: u64,
    /// Predicted experts that were copied to the device, the ones in progress included.
    pub copies_ahead: u64,
    /// Those that were wanted before they left the device.
    pub useful_copies_ahead: u64,
}

larder_core::fieldwise!(TierCounts {
    device_hits,
    host_hits,
    in_flight_hits,
    misses,
    rereads,
    promotions,
    demotions,
    free_demotions,
    evictions,
    prefetches,
    useful_prefetches,
    copies_ahead,
    useful_copies_ahead
});

impl TierCounts {
    /// Number of wanted experts.
    pub fn wanted(&self) -> u64 {
        self.device_hits + self.host_hits + self.in_flight_hits + self.misses
    }
}

/// What a device was asked for, and how often its caller had to wait for it. The copies of experts are counted apart.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DeviceWork {
    /// Kernels that were launched.
    pub launches: u64,
    /// Launches of graphs.
    pub graphs: u64,
    /// Kernels that were started by these.
    pub graph_launches: u64,
    /// Graphs that could not be made; behind the third, none is.
    pub failed_graphs: u64,
    /// Waits for kernels; none for what an earlier wait has shown to be complete.
    pub waits: u64,
    /// Bytes of inputs, lists and outputs of kernels that were copied to the device or back.
    pub exchanged_bytes: u64,
}

larder_core::fieldwise!(DeviceWork { launches, graphs, graph_launches, failed_graphs, waits, exchanged_bytes });

/// Traffic of two tiers since they were made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TierTraffic {
    /// The ledger's counts.
    pub counts: TierCounts,
    /// Experts computed on the device.
    pub on_device: u64,
    /// Experts computed on the CPU.
    pub on_host: u64,
    /// Bytes of demand reads.
    pub demand_bytes: u64,
    /// Bytes of prefetches.
    pub prefetch_bytes: u64,
    /// Time in which reads were in flight, as seen by the cache.
    pub read_busy: Duration,
    /// Bytes copied to the device.
    pub to_device_bytes: u64,
    /// Bytes copied out of the device.
    pub from_device_bytes: u64,
    /// Time in which the link was busy with copies to the device.
    pub to_device_busy: Duration,
    /// Time in which the link was busy with copies out of the device.
    pub from_device_busy: Duration,
    /// Copies that failed.
    pub failed_copies: u64,
    /// What the device was asked for beside these copies, by all of its users.
    pub work: DeviceWork,
    /// Time in which nothing could be computed because no expert had arrived.
    pub waited: Duration,
    /// Time spent computing experts; of work that the device does concurrently, only the time in which the caller
    /// waited for it.
    pub computed: Duration,
    /// Time in which bytes that were read were compared with their checksums.
    pub checked: Duration,
    /// Time of handing reads to the reader and taking completions from it, without waiting.
    pub submitting: Duration,
}

larder_core::fieldwise!(TierTraffic {
    counts,
    on_device,
    on_host,
    demand_bytes,
    prefetch_bytes,
    read_busy,
    to_device_bytes,
    from_device_bytes,
    to_device_busy,
    from_device_busy,
    failed_copies,
    work,
    waited,
    computed,
    checked,
    submitting
});
