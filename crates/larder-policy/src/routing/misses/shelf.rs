//! The rule `shelf`: missing experts of little weight are computed from their smaller copies, which are read instead.

use larder_core::Gate;

use super::{ExpertChoice, MissRule, MissRuleRow};
use crate::routing::{KEEP, Keep, PHASE, Ranking, RouterInput};
use crate::spec::{Domain, Knob};

pub(super) const RULE: MissRuleRow = MissRuleRow {
    name: "shelf",
    about: "a missing expert with less weight than τ is computed from its smaller copy",
    knobs: &[
        Knob {
            name: "tau",
            about: "the weight from which on an expert is read whole",
            domain: Domain::Number(0.0..=f64::MAX),
            default: None,
        },
        KEEP,
        PHASE,
    ],
    reads_small_copies: true,
    make: |options| {
        let below = options.required("tau", options.number("tau"))? as f32;
        Ok(Box::new(Shelf { below, keep: Keep::new(options) }))
    },
};

struct Shelf {
    below: f32,
    keep: Keep,
}

impl MissRule for Shelf {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.keep.gate_error(gate)
    }

    fn apply(&mut self, input: &RouterInput, _: &Ranking, present: &dyn Fn(usize) -> bool, choice: &mut ExpertChoice) {
        // Smaller copies are in no trace, and a trace has an expert of every token.
        let keep = self.keep.of(input.gate.top_k).max(1);
        let ExpertChoice { experts, weights, small } = choice;
        let is_small = |at: usize| at >= keep && weights[at].abs() < self.below && !present(experts[at].index());
        small.clear();
        small.extend((0..experts.len()).map(is_small));
        if !small.contains(&true) {
            small.clear();
        }
    }
}
