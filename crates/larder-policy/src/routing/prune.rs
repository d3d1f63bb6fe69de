use larder_core::Gate;

use super::{Ask, PHASE, Pick, Ranking, Strategy, beyond};
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

impl Pick for Prune {
    fn objection(&self, gate: &Gate) -> Option<String> {
        beyond("h", self.left, gate)
    }

    fn pick(&mut self, _: &Ask, ranking: &mut Ranking, _: &dyn Fn(usize) -> bool) {
        ranking.mark_first(self.left);
    }
}
