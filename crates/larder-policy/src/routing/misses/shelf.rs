//! The rule `shelf`: missing experts of little weight are computed from their smaller copies, which are read instead.

use super::{ExpertChoice, MissRule, MissRuleRow};
use crate::routing::{PHASE, Ranking, RouterInput};
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
        PHASE,
    ],
    reads_small_copies: true,
    make: |options| {
        let below = options.required("tau", options.number("tau"))? as f32;
        Ok(Box::new(Shelf { below }))
    },
};

struct Shelf {
    below: f32,
}

impl MissRule for Shelf {
    fn apply(&mut self, _: &RouterInput, _: &Ranking, present: &dyn Fn(usize) -> bool, choice: &mut ExpertChoice) {
        let is_small =
            |(expert, weight): (&larder_core::ExpertId, &f32)| weight.abs() < self.below && !present(expert.index());
        let small = choice.experts.iter().zip(&choice.weights).map(is_small);
        choice.small.clear();
        choice.small.extend(small);
        if !choice.small.contains(&true) {
            choice.small.clear();
        }
    }
}
