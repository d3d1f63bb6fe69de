//! The steps of a trace: which experts each pass needs in each row.

use super::{CapacityAt, Trace};
use crate::MoeRow;

/// The experts that one forward pass needs in one MoE row.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceStep<'a> {
    /// The layer.
    pub row: MoeRow,
    /// The needed experts, each once, in order of last use: token by token, and those of one token in order of rank.
    pub wanted: Vec<usize>,
    /// For each of them, the number of tokens of the pass that chose it.
    pub tokens: Vec<usize>,
    /// Router logits if the pass has one token and the trace holds logits, otherwise empty.
    pub logits: &'a [f32],
    /// Whether a sequence starts with this step.
    pub starts_sequence: bool,
    /// The changes of the number of slots since the step before, in order: those before a sequence starts with this
    /// step come first.
    pub capacities: &'a [CapacityAt],
}

/// Iterator over the steps of a trace, pass by pass and row by row.
pub struct Steps<'a> {
    trace: &'a Trace,
    pass: usize,
    row: usize,
    /// First token of the current pass.
    token: usize,
    /// Number of sequences that have started.
    sequence: usize,
    /// First token of the next sequence.
    next_sequence: usize,
    /// Per expert, the last step that needed it, and its place among the wanted ones of that step.
    seen: Vec<(usize, usize)>,
    step: usize,
    /// Number of changes of the capacity so far.
    changes: usize,
}

impl<'a> Steps<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        let seen = vec![(0, 0); trace.experts];
        Steps { trace, pass: 0, row: 0, token: 0, sequence: 0, next_sequence: 0, seen, step: 0, changes: 0 }
    }

    /// The distinct experts of the pass in the current row, and how many of its tokens chose each.
    fn wanted(&mut self, tokens: usize) -> (Vec<usize>, Vec<usize>) {
        self.step += 1;
        let (mut wanted, mut counts) = (Vec::new(), Vec::new());
        for token in (self.token..self.token + tokens).rev() {
            for expert in self.trace.chosen(token, self.row).iter().rev().map(|id| *id as usize) {
                match &mut self.seen[expert] {
                    (step, place) if *step == self.step => counts[*place] += 1,
                    seen => {
                        *seen = (self.step, wanted.len());
                        wanted.push(expert);
                        counts.push(1);
                    }
                }
            }
        }
        wanted.reverse();
        counts.reverse();
        (wanted, counts)
    }

    /// The changes of the number of slots before the current row, which are before the first of a pass.
    fn capacities(&mut self) -> &'a [CapacityAt] {
        let changes = &self.trace.capacities[self.changes..];
        let due = changes.iter().take_while(|change| self.row == 0 && change.pass as usize <= self.pass).count();
        self.changes += due;
        &changes[..due]
    }

    fn begins_sequence(&mut self) -> bool {
        let begins = self.row == 0 && self.token == self.next_sequence;
        if begins {
            self.next_sequence += self.trace.sequences[self.sequence] as usize;
            self.sequence += 1;
        }
        begins
    }
}

impl<'a> Iterator for Steps<'a> {
    type Item = TraceStep<'a>;

    fn next(&mut self) -> Option<TraceStep<'a>> {
        let tokens = *self.trace.passes.get(self.pass)? as usize;
        let starts_sequence = self.begins_sequence();
        let logits = if tokens == 1 { self.trace.logits_of(self.token, self.row) } else { &[] };
        let (wanted, counts) = self.wanted(tokens);
        let capacities = self.capacities();
        let step = TraceStep { row: MoeRow(self.row), wanted, tokens: counts, logits, starts_sequence, capacities };
        self.row += 1;
        if self.row == self.trace.rows {
            self.row = 0;
            self.pass += 1;
            self.token += tokens;
        }
        Some(step)
    }
}
