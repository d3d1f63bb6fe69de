//! The strategy `prune`: only the best of the model's own choice.

use larder_core::Gate;

use super::{PHASE, Ranking, RouterInput, Selector, Strategy, exceeds_top_k};
use crate::spec::{Domain, Knob};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "prune",
    about: "only the first H of the model's own choice",
    knobs: &[
        Knob {
            name: "h",
            about: "how many experts are left",
            domain: Domain::Count(1..=u16::MAX as u64),
            default: None,
        },
        PHASE,
    ],
    make: |options, _| {
        let left = options.required("h", options.count("h"))? as usize;
        Ok(Box::new(Prune { left }))
    },
};

struct Prune {
    left: usize,
}

impl Selector for Prune {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        exceeds_top_k("h", self.left, gate)
    }

    fn select(&mut self, _: &RouterInput, ranking: &mut Ranking, _: &dyn Fn(usize) -> bool) {
        ranking.mark_first(self.left);
    }
}
