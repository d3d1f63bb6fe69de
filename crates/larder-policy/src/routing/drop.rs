//! The probe `drop`: leaves out the experts from a rank on.

use larder_core::Gate;

use super::{PHASE, Ranking, RouterInput, Selector, Strategy, exceeds_top_k};
use crate::spec::{Domain, Knob};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "drop",
    about: "a probe: leaves out the experts of rank K and worse; the best has rank 1",
    knobs: &[
        Knob {
            name: "k",
            about: "the first rank that is dropped",
            domain: Domain::Count(2..=u16::MAX as u64),
            default: None,
        },
        PHASE,
    ],
    make: |options, _| {
        let rank = options.required("k", options.count("k"))? as usize;
        Ok(Box::new(Drop { rank }))
    },
};

struct Drop {
    rank: usize,
}

impl Selector for Drop {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        exceeds_top_k("k", self.rank, gate)
    }

    fn select(&mut self, _: &RouterInput, ranking: &mut Ranking, _: &dyn Fn(usize) -> bool) {
        ranking.mark_first(self.rank - 1);
    }
}
