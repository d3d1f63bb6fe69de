//! Batches for training.

use larder_policy::eviction::learned::{FEATURES, Features, MoeSize, UsageFeatures};

use super::labels::Sequence;
use crate::Rng;

/// A network's view of past choices.
pub(super) trait NetworkInput {
    /// Inputs per row.
    fn width(size: MoeSize) -> usize;
    /// Resets to the state before any choice.
    fn new_sequence(&mut self);
    /// Adds the choice of a row.
    fn observe(&mut self, row: usize, wanted: &[usize]);
    /// Writes the inputs of a row.
    fn write(&self, row: usize, into: &mut [f32]);
}

impl NetworkInput for Features {
    fn width(size: MoeSize) -> usize {
        FEATURES * size.experts
    }

    fn new_sequence(&mut self) {
        Features::new_sequence(self);
    }

    fn observe(&mut self, row: usize, wanted: &[usize]) {
        Features::observe(self, row, wanted);
    }

    fn write(&self, row: usize, into: &mut [f32]) {
        let experts = into.len() / FEATURES;
        for expert in 0..experts {
            for (feature, value) in self.of(row, expert).into_iter().enumerate() {
                into[feature * experts + expert] = value;
            }
        }
    }
}

impl NetworkInput for UsageFeatures {
    fn width(size: MoeSize) -> usize {
        2 * size.experts
    }

    fn new_sequence(&mut self) {
        UsageFeatures::new_sequence(self);
    }

    fn observe(&mut self, row: usize, wanted: &[usize]) {
        UsageFeatures::observe(self, row, wanted);
    }

    fn write(&self, row: usize, into: &mut [f32]) {
        self.input(row, into);
    }
}

/// Some passes of several sequences, one sequence per lane.
pub(super) struct Batch {
    pub lanes: usize,
    pub passes: usize,
    /// `[rows, lanes, 1 + passes, width]`: before the first pass, and after each.
    pub inputs: Vec<f32>,
    /// `[rows, lanes, passes, experts]`: passes until the expert's next use, 0 for none.
    pub next_use: Vec<u16>,
    /// The same shape: whether the expert has a target, because the Belady cache keeps it or there is none.
    pub targeted: Vec<bool>,
    /// `[lanes, passes]`: passes that follow in the sequence; `None` where there is no pass.
    pub passes_left: Vec<Option<u32>>,
}

/// Batches from sequences that run side by side, each from its start to its end, so that memory does not grow with the
/// trace.
pub(super) struct Lanes<'a, S> {
    size: MoeSize,
    belady_slots: Option<usize>,
    sequences: &'a [Sequence<'a>],
    waiting: Vec<usize>,
    lanes: Vec<Lane<S>>,
}

struct Lane<S> {
    seen: S,
    belady: Option<super::labels::BeladyCache>,
    /// The current sequence, its next pass and its labels; `None` when no sequence is left.
    at: Option<(usize, usize, Vec<u16>)>,
}

impl<'a, S: NetworkInput> Lanes<'a, S> {
    /// Lanes over the sequences, shuffled by `rng` if there is one. `belady_slots` is the size of the Belady cache per
    /// row.
    pub fn new(
        size: MoeSize,
        sequences: &'a [Sequence<'a>],
        (lanes, belady_slots): (usize, Option<usize>),
        rng: Option<&mut Rng>,
        seen: impl Fn() -> S,
    ) -> Self {
        let mut waiting: Vec<usize> = (0..sequences.len()).rev().collect();
        if let Some(rng) = rng {
            rng.shuffle(&mut waiting);
        }
        let lane = |_| Lane { seen: seen(), belady: None, at: None };
        Lanes { size, belady_slots, sequences, waiting, lanes: (0..lanes.min(sequences.len())).map(lane).collect() }
    }

    /// A batch of the next `passes` of each lane; `None` when all sequences are done.
    pub fn next(&mut self, passes: usize) -> Option<Batch> {
        for lane in &mut self.lanes {
            if lane.at.is_none()
                && let Some(next) = self.waiting.pop()
            {
                lane.seen.new_sequence();
                lane.belady = self.belady_slots.map(|slots| super::labels::BeladyCache::new(self.size, slots));
                lane.at = Some((next, 0, self.sequences[next].next_uses(self.size)));
            }
        }
        if self.lanes.iter().all(|lane| lane.at.is_none()) {
            return None;
        }
        let MoeSize { rows, experts, .. } = self.size;
        let (lanes, width) = (self.lanes.len(), S::width(self.size));
        let mut batch = Batch {
            lanes,
            passes,
            inputs: vec![0.0; rows * lanes * (1 + passes) * width],
            next_use: vec![0; rows * lanes * passes * experts],
            targeted: vec![self.belady_slots.is_none(); rows * lanes * passes * experts],
            passes_left: vec![None; lanes * passes],
        };
        for (i, lane) in self.lanes.iter_mut().enumerate() {
            lane.fill(self.size, self.sequences, i, &mut batch);
        }
        Some(batch)
    }
}

impl<S: NetworkInput> Lane<S> {
    fn fill(&mut self, size: MoeSize, sequences: &[Sequence], nth: usize, batch: &mut Batch) {
        let Some((sequence, from, labels)) = self.at.take() else { return };
        let MoeSize { rows, experts, .. } = size;
        let (width, cells) = (S::width(size), rows * experts);
        let place = |row: usize, pass: usize| (row * batch.lanes + nth) * (1 + batch.passes) + pass;
        for row in 0..rows {
            self.seen.write(row, &mut batch.inputs[place(row, 0) * width..][..width]);
        }
        let all = &sequences[sequence];
        let to = (from + batch.passes).min(all.passes());
        for pass in from..to {
            let now = pass - from;
            batch.passes_left[nth * batch.passes + now] = Some((all.passes() - 1 - pass) as u32);
            for row in 0..rows {
                let wanted = all.wanted(pass, row);
                let next_use = &labels[pass * cells + row * experts..][..experts];
                self.seen.observe(row, wanted);
                self.seen.write(row, &mut batch.inputs[place(row, now + 1) * width..][..width]);
                let label = ((row * batch.lanes + nth) * batch.passes + now) * experts;
                batch.next_use[label..label + experts].copy_from_slice(next_use);
                if let Some(belady) = &mut self.belady {
                    belady.serve(row * experts, wanted, next_use);
                    batch.targeted[label..label + experts].copy_from_slice(belady.kept(row * experts, experts));
                }
            }
        }
        if to < all.passes() {
            self.at = Some((sequence, to, labels));
        }
    }
}
