use larder_cache::Wave;

/// A miss this many passes after the expert left, or fewer, counts as a re-fetch.
pub const REFETCH_WITHIN: u32 = 5;

const NEVER: u32 = u32::MAX;

/// How long experts stayed in memory, in forward passes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Lives {
    /// Passes that experts were in memory, summed over all stays.
    pub resident: u64,
    /// How many stays there were; the last ones were cut off by the end.
    pub stays: u64,
    /// Stays that ended, by length: below 1 pass, below 2, below 4, and so on.
    pub lengths: Vec<u64>,
    /// Misses of experts that had left at most [`REFETCH_WITHIN`] passes before.
    pub refetches: u64,
}

impl Lives {
    /// Passes that an expert stays, on average.
    pub fn mean(&self) -> f64 {
        self.resident as f64 / self.stays.max(1) as f64
    }

    pub(crate) fn add(&mut self, other: &Lives) {
        self.resident += other.resident;
        self.stays += other.stays;
        self.refetches += other.refetches;
        if self.lengths.len() < other.lengths.len() {
            self.lengths.resize(other.lengths.len(), 0);
        }
        self.lengths.iter_mut().zip(&other.lengths).for_each(|(sum, n)| *sum += n);
    }
}

/// Watches who comes and goes.
pub(crate) struct Watch {
    experts: usize,
    /// The present pass.
    now: u32,
    last_row: usize,
    /// The pass in which each expert came, or [`NEVER`].
    came: Vec<u32>,
    /// The pass in which each expert last left, or [`NEVER`].
    left: Vec<u32>,
    lives: Lives,
}

impl Watch {
    pub fn new(rows: usize, experts: usize) -> Self {
        let never = vec![NEVER; rows * experts];
        Watch { experts, now: 0, last_row: 0, came: never.clone(), left: never, lives: Lives::default() }
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
            self.lives.stays += 1;
            let left = self.left[at];
            self.lives.refetches += u64::from(left != NEVER && self.now - left <= REFETCH_WITHIN);
        }
        for (row, expert) in &wave.evicted {
            self.leaves(row * self.experts + expert);
        }
    }

    fn leaves(&mut self, at: usize) {
        let length = self.now - std::mem::replace(&mut self.came[at], NEVER);
        self.left[at] = self.now;
        self.lives.resident += u64::from(length);
        let class = (u32::BITS - length.leading_zeros()) as usize;
        if self.lives.lengths.len() <= class {
            self.lives.lengths.resize(class + 1, 0);
        }
        self.lives.lengths[class] += 1;
    }

    /// All of it, those still in memory included.
    pub fn finish(mut self) -> Lives {
        let there = self.came.iter().filter(|came| **came != NEVER);
        self.lives.resident += there.map(|came| u64::from(self.now - came)).sum::<u64>();
        self.lives
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
        let mut watch = Watch::new(2, 4);
        watch.visit(0); // pass 1
        watch.wave(0, &wave(&[0, 1], &[]));
        watch.visit(1);
        watch.wave(1, &wave(&[3], &[(0, 1)])); // 1 leaves in the pass in which it came
        (0..3).for_each(|_| watch.visit(0)); // passes 2 to 4
        watch.wave(0, &wave(&[1], &[(0, 0)])); // 1 is back after 3 passes, 0 leaves after 3
        (0..6).for_each(|_| watch.visit(0)); // passes 5 to 10
        watch.wave(0, &wave(&[0], &[])); // 0 is back after 6 passes
        let lives = watch.finish();
        assert_eq!((lives.stays, lives.refetches), (5, 1));
        assert_eq!(lives.lengths, [1, 0, 1]);
        assert_eq!(lives.resident, 3 + 9 + 6); // 0, then what is still there: (1, 3), 1 and 0
    }

    #[test]
    fn sums_are_taken_class_by_class() {
        let mut one = Lives { resident: 4, stays: 2, lengths: vec![1], refetches: 1 };
        one.add(&Lives { resident: 6, stays: 3, lengths: vec![1, 0, 2], refetches: 0 });
        assert_eq!(one, Lives { resident: 10, stays: 5, lengths: vec![2, 0, 2], refetches: 1 });
        assert_eq!(one.mean(), 2.0);
    }
}
