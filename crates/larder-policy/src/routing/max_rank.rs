//! The strategy `max-rank`: promotes residents among the best-ranked experts.

use larder_core::Gate;

use super::{KEEP, Keep, PHASE, Ranking, RouterInput, Selector, Strategy};
use crate::spec::{Domain, Knob};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "max-rank",
    about: "residents among the first M come before other experts; the first J are always chosen",
    knobs: &[
        Knob {
            name: "m",
            about: "the last rank that is promoted",
            domain: Domain::Count(1..=u16::MAX as u64),
            default: None,
        },
        KEEP,
        PHASE,
    ],
    make: |options, _| {
        let most = options.required("m", options.count("m"))? as usize;
        Ok(Box::new(MaxRank { most, keep: Keep::new(options) }))
    },
};

/// Algorithm 1 of "Mixture of Cache-Conditional Experts".
struct MaxRank {
    most: usize,
    keep: Keep,
}

impl Selector for MaxRank {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        let experts = gate.experts;
        let more = || format!("has m={}, but the model has only {experts} experts", self.most);
        self.keep.gate_error(gate).or_else(|| (self.most > experts).then(more))
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        promote(ranking, input.gate.top_k, self.keep.of(input.gate.top_k), self.most, present);
    }
}

/// Marks `top_k` experts: the first `keep`, then the present ones among the first `most`, then the others, each in the
/// order of the ranking.
pub(super) fn promote(ranking: &mut Ranking, top_k: usize, keep: usize, most: usize, present: &dyn Fn(usize) -> bool) {
    ranking.mark_first(keep);
    for rank in 0..most {
        let expert = ranking.at(rank);
        if ranking.count() < top_k && ranking.is_eligible(expert) && present(expert) {
            ranking.mark(expert);
        }
    }
    ranking.fill(top_k);
}
