//! The probe `replace`: a random expert in the place of one rank.

use larder_core::Gate;

use super::{PHASE, Ranking, RouterInput, Selector, Strategy, exceeds_top_k};
use crate::spec::{Domain, Knob};
use larder_core::Rng;

pub(super) const STRATEGY: Strategy = Strategy {
    name: "replace",
    about: "a probe: a random expert in the place of the expert of rank K; the best has rank 1",
    knobs: &[
        Knob {
            name: "k",
            about: "the rank that is replaced",
            domain: Domain::Count(1..=u16::MAX as u64),
            default: None,
        },
        Knob {
            name: "seed",
            about: "seed of the random numbers",
            domain: Domain::Count(0..=u64::MAX),
            default: Some("0"),
        },
        PHASE,
    ],
    make: |options, _| {
        let rank = options.required("k", options.count("k"))? as usize;
        let seed = options.count("seed").expect("it has a default");
        Ok(Box::new(Replace { rank, rng: Rng::with_stream(seed, 0) }))
    },
};

struct Replace {
    rank: usize,
    rng: Rng,
}

impl Selector for Replace {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        let in_the_running = gate.groups.map_or(gate.experts, |g| gate.experts / g.count * g.keep);
        let none = || "has no expert to substitute: the model always chooses every eligible expert".to_owned();
        exceeds_top_k("k", self.rank, gate).or_else(|| (in_the_running == gate.top_k).then(none))
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, _: &dyn Fn(usize) -> bool) {
        let top_k = input.gate.top_k;
        (0..top_k).filter(|rank| rank + 1 != self.rank).for_each(|rank| ranking.mark(ranking.at(rank)));
        let out = ranking.at(self.rank - 1);
        let free = |e: &usize| *e != out && !ranking.is_marked(*e) && ranking.is_eligible(*e);
        let others = ranking.order().filter(free).count();
        // All other experts may have a probability of 0.
        let instead = if others == 0 { None } else { ranking.order().filter(free).nth(self.rng.below(others)) };
        ranking.mark(instead.unwrap_or(out));
    }
}
