use std::ops::{Add, Sub};
use std::time::{Duration, Instant};

use crate::ledger::CacheCounts;
use crate::tiers::TierTraffic;

/// What passed through a cache so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// What the ledger counted.
    pub counts: CacheCounts,
    /// Bytes read because they were wanted.
    pub demand_bytes: u64,
    /// Bytes read on a guess.
    pub prefetch_bytes: u64,
    /// Time in which nothing could be computed because nothing had arrived.
    pub waited: Duration,
    /// Time spent computing experts.
    pub computed: Duration,
    /// Time in which reads were under way, as far as the cache saw.
    pub read_busy: Duration,
    /// What of it was where, if there are two tiers.
    pub tiers: Option<TierTraffic>,
}

impl Traffic {
    /// All bytes read.
    pub fn bytes(&self) -> u64 {
        self.demand_bytes + self.prefetch_bytes
    }

    /// The share of wanted experts that were in memory.
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
            waited: self.waited + other.waited,
            computed: self.computed + other.computed,
            read_busy: self.read_busy + other.read_busy,
            tiers: either(self.tiers, other.tiers, |a, b| a + b),
        }
    }
}

impl Sub for Traffic {
    type Output = Traffic;

    /// What passed between two looks.
    fn sub(self, then: Traffic) -> Traffic {
        Traffic {
            counts: self.counts - then.counts,
            demand_bytes: self.demand_bytes - then.demand_bytes,
            prefetch_bytes: self.prefetch_bytes - then.prefetch_bytes,
            waited: self.waited - then.waited,
            computed: self.computed - then.computed,
            read_busy: self.read_busy - then.read_busy,
            tiers: either(self.tiers, then.tiers, |a, b| a - b),
        }
    }
}

/// Nothing counts as zeros where there is something else.
fn either(
    a: Option<TierTraffic>,
    b: Option<TierTraffic>,
    f: fn(TierTraffic, TierTraffic) -> TierTraffic,
) -> Option<TierTraffic> {
    (a.is_some() || b.is_some()).then(|| f(a.unwrap_or_default(), b.unwrap_or_default()))
}

/// Adds up the time in which something is under way.
#[derive(Default)]
pub(crate) struct BusyTime {
    total: Duration,
    since: Option<Instant>,
}

impl BusyTime {
    /// Something may have begun or ended: whether anything is under way now.
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

    /// The time so far.
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
