//! Bytes, times and counts of a cache.

use std::ops::{Add, Sub};
use std::time::{Duration, Instant};

use crate::one_tier::CacheCounts;
use crate::two_tiers::{TierCounts, TierTraffic};

/// Traffic of a cache since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// The ledger's counts.
    pub counts: CacheCounts,
    /// Bytes of demand reads.
    pub demand_bytes: u64,
    /// Bytes of prefetches, of reads ahead in a prefill, and of smaller copies whose reads began during the visit
    /// before.
    pub prefetch_bytes: u64,
    /// Smaller copies of experts that were computed instead of missing experts.
    pub small_reads: u64,
    /// Bytes that were read for tokens that were computed a second time, to compare.
    pub beside_bytes: u64,
    /// Time in which nothing could be computed because no expert had arrived.
    pub waited: Duration,
    /// Time spent computing experts.
    pub computed: Duration,
    /// Time in which the threads compared bytes that were read with their checksums.
    pub checked: Duration,
    /// Time that the visiting thread spent on handing reads to the reader and on taking completions from it, without
    /// waiting.
    pub submitting: Duration,
    /// Time in which reads were in flight, as seen by the cache.
    pub read_busy: Duration,
    /// Reads ahead of a layer's visit.
    pub reads_ahead: ReadsAhead,
    /// The traffic by tier, if there are two tiers.
    pub tiers: Option<TierTraffic>,
}

/// Counts of experts that were read ahead of their layer's visit. They are misses as any others, read earlier.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReadsAhead {
    /// Reads that have begun.
    pub begun: u64,
    /// Experts that their layer wanted.
    pub used: u64,
    /// Experts that it did not want.
    pub unused: u64,
    /// Of the reads that have begun, those of experts that were known to be wanted.
    pub certain: u64,
}

larder_core::fieldwise!(ReadsAhead { begun, used, unused, certain });

impl Traffic {
    /// All bytes read.
    pub fn bytes(&self) -> u64 {
        self.demand_bytes + self.prefetch_bytes
    }

    /// The share of wanted experts that were resident.
    pub fn hit_rate(&self) -> f64 {
        self.counts.hits as f64 / self.counts.wanted().max(1) as f64
    }
}

impl Add for Traffic {
    type Output = Traffic;

    fn add(self, other: Traffic) -> Traffic {
        Traffic {
            counts: self.counts + other.counts,
            demand_bytes: self.demand_bytes + other.demand_bytes,
            prefetch_bytes: self.prefetch_bytes + other.prefetch_bytes,
            small_reads: self.small_reads + other.small_reads,
            beside_bytes: self.beside_bytes + other.beside_bytes,
            waited: self.waited + other.waited,
            computed: self.computed + other.computed,
            checked: self.checked + other.checked,
            submitting: self.submitting + other.submitting,
            read_busy: self.read_busy + other.read_busy,
            reads_ahead: self.reads_ahead + other.reads_ahead,
            tiers: either(self.tiers, other.tiers, |a, b| a + b),
        }
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    /// The traffic between two readings.
    fn sub(self, then: Traffic) -> Traffic {
        Traffic {
            counts: self.counts - then.counts,
            demand_bytes: self.demand_bytes - then.demand_bytes,
            prefetch_bytes: self.prefetch_bytes - then.prefetch_bytes,
            small_reads: self.small_reads - then.small_reads,
            beside_bytes: self.beside_bytes - then.beside_bytes,
            waited: self.waited - then.waited,
            computed: self.computed - then.computed,
            checked: self.checked - then.checked,
            submitting: self.submitting - then.submitting,
            read_busy: self.read_busy - then.read_busy,
            reads_ahead: self.reads_ahead - then.reads_ahead,
            tiers: either(self.tiers, then.tiers, |a, b| a - b),
        }
    }
}

/// Combines two; `None` counts as zeros beside a value.
fn either(
    a: Option<TierTraffic>,
    b: Option<TierTraffic>,
    f: fn(TierTraffic, TierTraffic) -> TierTraffic,
) -> Option<TierTraffic> {
    (a.is_some() || b.is_some()).then(|| f(a.unwrap_or_default(), b.unwrap_or_default()))
}

/// Both tiers seen as one cache: a hit in either tier is a hit, and an expert that leaves both is evicted.
impl From<TierTraffic> for Traffic {
    fn from(tiers: TierTraffic) -> Traffic {
        let TierCounts {
            device_hits,
            host_hits,
            in_flight_hits,
            misses,
            rereads,
            evictions,
            prefetches,
            useful_prefetches,
            ..
        } = tiers.counts;
        let hits = device_hits + host_hits;
        Traffic {
            counts: CacheCounts { hits, misses, evictions, rereads, in_flight_hits, prefetches, useful_prefetches },
            demand_bytes: tiers.demand_bytes,
            prefetch_bytes: tiers.prefetch_bytes,
            waited: tiers.waited,
            computed: tiers.computed,
            checked: tiers.checked,
            submitting: tiers.submitting,
            read_busy: tiers.read_busy,
            small_reads: 0,
            beside_bytes: 0,
            reads_ahead: ReadsAhead::default(),
            tiers: Some(tiers),
        }
    }
}

/// Adds up the time in which an operation is in flight.
#[derive(Default)]
pub(crate) struct BusyTime {
    total: Duration,
    since: Option<Instant>,
}

impl BusyTime {
    /// Sets whether any operation is in flight now.
    pub fn set(&mut self, busy: bool) {
        match (self.since, busy) {
            (None, true) => self.since = Some(Instant::now()),
            (Some(since), false) => {
                self.total += since.elapsed();
                self.since = None;
            }
            _ => {}
        }
    }

    /// The total so far.
    pub fn total(&self) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_busy_time_counts() {
        let mut busy = BusyTime::default();
        busy.set(false);
        assert_eq!(busy.total(), Duration::ZERO);
        busy.set(true);
        std::thread::sleep(Duration::from_millis(5));
        busy.set(true);
        busy.set(false);
        let total = busy.total();
        assert!(total >= Duration::from_millis(5));
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(busy.total(), total);
    }
}
