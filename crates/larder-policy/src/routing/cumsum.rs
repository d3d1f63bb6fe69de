//! The strategy `cumsum`: promotes residents among the experts that hold a given sum of probability.

use larder_core::Gate;

use super::max_rank::promote;
use super::{KEEP, Keep, PHASE, Ranking, RouterInput, Selector, Strategy};
use crate::spec::{Domain, Knob};

pub(super) const STRATEGY: Strategy = Strategy {
    name: "cumsum",
    about: "as max-rank, with M chosen for each token so that the probabilities of the first M sum to P",
    knobs: &[
        Knob { name: "p", about: "the sum that is reached", domain: Domain::Number(0.0..=1.0), default: None },
        KEEP,
        PHASE,
    ],
    make: |options, _| {
        let enough = options.required("p", options.number("p"))? as f32;
        Ok(Box::new(Cumsum { enough, keep: Keep::new(options), shares: Vec::new() }))
    },
};

/// Algorithm 2 of "Mixture of Cache-Conditional Experts".
struct Cumsum {
    enough: f32,
    keep: Keep,
    shares: Vec<f32>,
}

impl Selector for Cumsum {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.keep.gate_error(gate)
    }

    fn select(&mut self, input: &RouterInput, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        input.gate.probabilities(input.logits, &mut self.shares);
        let (mut sum, mut most) = (0.0, 0);
        while sum < self.enough && most < ranking.len() {
            sum += self.shares[ranking.at(most)];
            most += 1;
        }
        promote(ranking, input.gate.top_k, self.keep.of(input.gate.top_k), most, present);
    }
}
