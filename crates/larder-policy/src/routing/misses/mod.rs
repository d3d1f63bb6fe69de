//! What becomes of a chosen expert that is not in memory. One rule per file; to add one, copy the nearest file and add
//! its row to the table.
//!
//! A rule acts behind the strategy, on experts that would have to be read. What it changes, it does not make up for:
//! the weights of the other experts stay what they were.

mod light;
mod shelf;

use larder_core::{ExpertId, Gate};

use super::{Ranking, RouterInput};
use crate::spec::{Knob, Named, PolicyError, SpecOptions};

/// The experts of one token of one layer, with their weights.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct ExpertChoice {
    /// The experts, in the order of the model's own ranking.
    pub experts: Vec<ExpertId>,
    /// Their weights, in the same order.
    pub weights: Vec<f32>,
    /// For each expert, whether its smaller copy is enough; empty if none is.
    pub small: Vec<bool>,
}

impl ExpertChoice {
    /// Replaces it by these experts, weighted as the gate does.
    pub fn weigh(&mut self, gate: &Gate, logits: &[f32]) {
        gate.weights(logits, &self.experts, &mut self.weights);
        self.small.clear();
    }
}

/// Changes what is computed for a missing expert.
pub(super) trait MissRule: Send {
    /// Why the rule cannot work with a gate, or `None`.
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        let _ = gate;
        None
    }

    /// Changes a choice, of which it leaves at least one expert. `present` experts are resident. Experts are added in
    /// any order.
    fn apply(
        &mut self,
        input: &RouterInput,
        ranking: &Ranking,
        present: &dyn Fn(usize) -> bool,
        choice: &mut ExpertChoice,
    );
}

/// A rule for missing experts by name.
pub struct MissRuleRow {
    /// The name in flags and reports.
    pub name: &'static str,
    /// What it does, in a few words.
    pub about: &'static str,
    /// Its options.
    pub knobs: &'static [Knob],
    /// Whether the rule reads smaller copies of experts.
    pub reads_small_copies: bool,
    pub(super) make: fn(&SpecOptions) -> Result<Box<dyn MissRule>, PolicyError>,
}

impl Named for MissRuleRow {
    fn name(&self) -> &'static str {
        self.name
    }

    fn knobs(&self) -> &'static [Knob] {
        self.knobs
    }
}

/// Every rule, in the order in which they act.
pub const MISS_RULES: &[MissRuleRow] = &[light::RULE, shelf::RULE];

/// Drops the values that are marked.
pub(super) fn retain_unmarked<T>(values: &mut Vec<T>, marked: &[bool]) {
    let mut marked = marked.iter();
    values.retain(|_| !marked.next().expect("one mark for each value"));
}
