//! The model's own ranking of experts for one token, with marks.

use std::cmp::Ordering;

use larder_core::{ExpertId, Gate, Score};

/// All experts of a layer in the model's order of preference for one token, with marks on some.
#[derive(Default)]
pub struct Ranking {
    values: Vec<f32>,
    eligible: Vec<bool>,
    order: Vec<u16>,
    marks: Vec<bool>,
    marked: usize,
}

impl Ranking {
    /// Ranks the experts of a token and clears the marks: the first `top_k` are those of [`Gate::choose`]. Allocates
    /// nothing once it has seen a gate of this size.
    pub fn rank(&mut self, gate: &Gate, logits: &[f32]) {
        gate.selection_scores_and_mask(logits, &mut self.values, &mut self.eligible);
        if gate.score == Score::Softmax && gate.bias.is_none() {
            self.eligible.iter_mut().zip(&self.values).for_each(|(eligible, share)| *eligible &= *share > 0.0);
        }
        self.order.clear();
        self.order.extend(0..self.values.len() as u16);
        let values = &self.values;
        self.order.sort_unstable_by(|a, b| by_value_descending(values, *a, *b));
        self.clear();
    }

    /// The values that the model's own top-k sorts.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Whether an expert may be promoted: its group is selected, and its probability does not round to 0, by which the
    /// weights of a choice could not be divided.
    pub fn is_eligible(&self, expert: usize) -> bool {
        self.eligible[expert]
    }

    /// All experts, best first.
    pub fn order(&self) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator + '_ {
        self.order.iter().map(|e| usize::from(*e))
    }

    /// The expert at a rank, counted from 0.
    pub fn at(&self, rank: usize) -> usize {
        usize::from(self.order[rank])
    }

    /// Number of experts.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are no experts.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Marks an expert.
    pub fn mark(&mut self, expert: usize) {
        self.marked += usize::from(!std::mem::replace(&mut self.marks[expert], true));
    }

    /// Marks the best `count`.
    pub fn mark_first(&mut self, count: usize) {
        (0..count).for_each(|rank| self.mark(self.at(rank)));
    }

    /// Marks the best unmarked experts until `count` are marked.
    pub fn fill(&mut self, count: usize) {
        let mut rank = 0;
        while self.marked < count && rank < self.len() {
            self.mark(self.at(rank));
            rank += 1;
        }
    }

    /// Number of marked experts.
    pub fn count(&self) -> usize {
        self.marked
    }

    /// Whether an expert is marked.
    pub fn is_marked(&self, expert: usize) -> bool {
        self.marks[expert]
    }

    /// Clears all marks.
    pub fn clear(&mut self) {
        self.marks.clear();
        self.marks.resize(self.order.len(), false);
        self.marked = 0;
    }

    /// The marked experts, best first.
    pub fn marked(&self, out: &mut Vec<ExpertId>) {
        out.clear();
        out.extend(self.order().filter(|e| self.marks[*e]).take(self.marked).map(|e| ExpertId(e as u16)));
    }
}

/// Larger values first, the lower index first among equals, NaN last: as gates sort.
fn by_value_descending(values: &[f32], a: u16, b: u16) -> Ordering {
    let key = |i: u16| match values[usize::from(i)] {
        v if v.is_nan() => f32::NEG_INFINITY,
        v => v,
    };
    key(b).total_cmp(&key(a)).then(a.cmp(&b))
}
