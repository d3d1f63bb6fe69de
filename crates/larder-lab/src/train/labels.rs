//! Training targets: the next use of each expert, and the experts that Belady's policy keeps.

use larder_policy::eviction::learned::MoeSize;

use crate::Requests;

/// Limit of the labels: passes until an expert's next use.
pub(super) const NEXT_USE_MAX: u16 = 4096;

/// One sequence of a trace, laid out for training.
pub(super) struct Sequence<'a> {
    rows: usize,
    /// `[passes, rows]`
    wanted: Vec<&'a [usize]>,
}

impl<'a> Sequence<'a> {
    pub fn new(requests: &'a Requests) -> Self {
        Sequence { rows: requests.rows, wanted: requests.iter().map(|request| request.wanted).collect() }
    }

    /// Number of forward passes.
    pub fn passes(&self) -> usize {
        self.wanted.len() / self.rows
    }

    /// The experts that a row requests in a pass.
    pub fn wanted(&self, pass: usize, row: usize) -> &'a [usize] {
        self.wanted[pass * self.rows + row]
    }

    /// `[passes, rows, experts]`: passes until the expert's next use, 0 if there is none.
    pub fn next_uses(&self, size: MoeSize) -> Vec<u16> {
        let cells = size.rows * size.experts;
        let mut all = vec![0; self.passes() * cells];
        let mut ahead = vec![0u16; cells];
        for (pass, labels) in all.chunks_mut(cells).enumerate().rev() {
            labels.copy_from_slice(&ahead);
            ahead.iter_mut().filter(|d| **d > 0).for_each(|d| *d = (*d + 1).min(NEXT_USE_MAX));
            for row in 0..size.rows {
                self.wanted(pass, row).iter().for_each(|expert| ahead[row * size.experts + expert] = 1);
            }
        }
        all
    }
}

/// The residents of each row under Belady's policy, pass by pass: the training mask of the FlashMoE network.
pub(super) struct BeladyCache {
    slots: usize,
    resident: Vec<bool>,
}

impl BeladyCache {
    pub fn new(size: MoeSize, slots: usize) -> Self {
        BeladyCache { slots, resident: vec![false; size.rows * size.experts] }
    }

    /// The row whose experts start at `at` requests `wanted`; `ahead` has the next use of each of its experts.
    pub fn serve(&mut self, at: usize, wanted: &[usize], ahead: &[u16]) {
        let resident = &mut self.resident[at..at + ahead.len()];
        wanted.iter().for_each(|expert| resident[*expert] = true);
        let mut count = resident.iter().filter(|r| **r).count();
        while count > self.slots.max(wanted.len()) {
            let distance = |e: &usize| if ahead[*e] == 0 { u32::MAX } else { u32::from(ahead[*e]) };
            let furthest = (0..ahead.len()).filter(|e| resident[*e] && !wanted.contains(e)).max_by_key(distance);
            let Some(furthest) = furthest else { return };
            resident[furthest] = false;
            count -= 1;
        }
    }

    /// The residents of the row whose experts start at `at`.
    pub fn kept(&self, at: usize, experts: usize) -> &[bool] {
        &self.resident[at..at + experts]
    }
}

/// `[rows, experts]`: requests of each expert per pass.
pub(super) fn popularity(size: MoeSize, sequences: &[Sequence]) -> Vec<f32> {
    let mut count = vec![0u64; size.rows * size.experts];
    let mut passes = 0;
    for sequence in sequences {
        passes += sequence.passes();
        for pass in 0..sequence.passes() {
            for row in 0..size.rows {
                let wanted = sequence.wanted(pass, row);
                let single = wanted.len() <= size.top_k;
                wanted.iter().filter(|_| single).for_each(|expert| count[row * size.experts + expert] += 1);
            }
        }
    }
    count.iter().map(|n| (*n as f64 / passes.max(1) as f64) as f32).collect()
}

#[cfg(test)]
mod tests {
    use larder_core::{Trace, TracePass};

    use super::*;

    fn trace() -> Trace {
        let mut trace = Trace::new(1, 4, 1);
        for expert in [0, 1, 2, 0, 1, 0] {
            trace.push(&TracePass { ids: &[expert], ..TracePass::default() }).unwrap();
        }
        trace
    }

    const SIZE: MoeSize = MoeSize { rows: 1, experts: 4, top_k: 1 };

    #[test]
    fn next_uses_are_counted_from_the_end() {
        let trace = trace();
        let requests = Requests::by_sequence(&trace);
        let sequence = Sequence::new(&requests[0]);
        let labels = sequence.next_uses(SIZE);
        assert_eq!(labels[..8], [3, 1, 2, 0, 2, 3, 1, 0]);
        assert_eq!(labels[20..], [0, 0, 0, 0]);
        assert_eq!(popularity(SIZE, &[sequence])[..2], [0.5, 2.0 / 6.0]);
    }

    #[test]
    fn belady_keeps_the_expert_with_the_nearest_use() {
        let trace = trace();
        let requests = Requests::by_sequence(&trace);
        let sequence = Sequence::new(&requests[0]);
        let labels = sequence.next_uses(SIZE);
        let mut belady = BeladyCache::new(SIZE, 2);
        for pass in 0..3 {
            belady.serve(0, sequence.wanted(pass, 0), &labels[pass * 4..pass * 4 + 4]);
        }
        assert_eq!(belady.kept(0, 4), [true, false, true, false]);
    }
}
