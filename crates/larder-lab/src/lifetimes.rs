use larder_cache::Wave;

/// A miss this many passes after the expert left, or fewer, counts as a re-fetch.
pub const REFETCH_WITHIN: u32 = 5;

const NEVER: u32 = u32::MAX;

/// How long experts stayed in memory, in forward passes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LifetimeStats {
    /// Passes that experts were in memory, summed over all stays.
    pub resident_passes: u64,
    /// How many stays there were; the last ones were cut off by the end.
    pub stays: u64,
    /// Stays that ended, by length: below 1 pass, below 2, below 4, and so on.
    pub length_counts: Vec<u64>,
    /// Misses of experts that had left at most [`REFETCH_WITHIN`] passes before.
    pub refetches: u64,
}

impl LifetimeStats {
    /// Passes that an expert stays, on average.
    pub fn mean(&self) -> f64 {
        self.resident_passes as f64 / self.stays.max(1) as f64
    }

    pub(crate) fn add(&mut self, other: &LifetimeStats) {
        self.resident_passes += other.resident_passes;
        self.stays += other.stays;
        self.refetches += other.refetches;
        if self.length_counts.len() < other.length_counts.len() {
            self.length_counts.resize(other.length_counts.len(), 0);
        }
        self.length_counts.iter_mut().zip(&other.length_counts).for_each(|(sum, n)| *sum += n);
    }
}

/// Watches who comes and goes.
pub(crate) struct ResidencyTracker {
    experts: usize,
    /// The present pass.
    now: u32,
    last_row: usize,
    /// The pass in which each expert came, or [`NEVER`].
    came: Vec<u32>,
    /// The pass in which each expert last left, or [`NEVER`].
    left: Vec<u32>,
    lifetimes: LifetimeStats,
}

impl ResidencyTracker {
    pub fn new(rows: usize, experts: usize) -> Self {
        let never = vec![NEVER; rows * experts];
        ResidencyTracker {
            experts,
            now: 0,
            last_row: 0,
            came: never.clone(),
            left: never,
            lifetimes: LifetimeStats::default(),
        }
    }

    /// A layer is visited.
    pub fn visit(&mut self, row: usize) {
        self.now += u32::from(row <= self.last_row);
        self.last_row = row;
    }

    /// A wave of that layer is over.
    pub fn wave(&mut self, row: usize, wave: &Wave) {
        for (expert, _) in &wave.misses {
            let at = row * self.experts + expert;
            self.came[at] = self.now;
            self.lifetimes.stays += 1;
            let left = self.left[at];
            self.lifetimes.refetches += u64::from(left != NEVER && self.now - left <= REFETCH_WITHIN);
        }
        for (row, expert) in &wave.evicted {
            self.leaves(row * self.experts + expert);
        }
    }

    fn leaves(&mut self, at: usize) {
        let length = self.now - std::mem::replace(&mut self.came[at], NEVER);
        self.left[at] = self.now;
        self.lifetimes.resident_passes += u64::from(length);
        let class = (u32::BITS - length.leading_zeros()) as usize;
        if self.lifetimes.length_counts.len() <= class {
            self.lifetimes.length_counts.resize(class + 1, 0);
        }
        self.lifetimes.length_counts[class] += 1;
    }

    /// All of it, those still in memory included.
    pub fn finish(mut self) -> LifetimeStats {
        let there = self.came.iter().filter(|came| **came != NEVER);
        self.lifetimes.resident_passes += there.map(|came| u64::from(self.now - came)).sum::<u64>();
        self.lifetimes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(misses: &[usize], evicted: &[(usize, usize)]) -> Wave {
        Wave { misses: misses.iter().map(|e| (*e, 0)).collect(), evicted: evicted.to_vec(), ..Wave::default() }
    }

    #[test]
    fn stays_are_counted_in_passes_and_quick_returns_as_refetches() {
        let mut tracker = ResidencyTracker::new(2, 4);
        tracker.visit(0); // pass 1
        tracker.wave(0, &wave(&[0, 1], &[]));
        tracker.visit(1);
        tracker.wave(1, &wave(&[3], &[(0, 1)])); // 1 leaves in the pass in which it came
        (0..3).for_each(|_| tracker.visit(0)); // passes 2 to 4
        tracker.wave(0, &wave(&[1], &[(0, 0)])); // 1 is back after 3 passes, 0 leaves after 3
        (0..6).for_each(|_| tracker.visit(0)); // passes 5 to 10
        tracker.wave(0, &wave(&[0], &[])); // 0 is back after 6 passes
        let lifetimes = tracker.finish();
        assert_eq!((lifetimes.stays, lifetimes.refetches), (5, 1));
        assert_eq!(lifetimes.length_counts, [1, 0, 1]);
        assert_eq!(lifetimes.resident_passes, 3 + 9 + 6); // 0, then what is still there: (1, 3), 1 and 0
    }

    #[test]
    fn sums_are_taken_class_by_class() {
        let mut one = LifetimeStats { resident_passes: 4, stays: 2, length_counts: vec![1], refetches: 1 };
        one.add(&LifetimeStats { resident_passes: 6, stays: 3, length_counts: vec![1, 0, 2], refetches: 0 });
        assert_eq!(one, LifetimeStats { resident_passes: 10, stays: 5, length_counts: vec![2, 0, 2], refetches: 1 });
        assert_eq!(one.mean(), 2.0);
    }
}
