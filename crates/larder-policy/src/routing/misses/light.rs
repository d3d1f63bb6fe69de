//! The rule `light`: missing experts of little weight are not read. They are left out, or the best resident takes their
//! place.

use larder_core::{ExpertId, Gate, Weighting};

use super::{ExpertChoice, MissRule, MissRuleRow, retain_unmarked};
use crate::routing::{KEEP, Keep, PHASE, Ranking, RouterInput};
use crate::spec::{Domain, Knob};

pub(super) const RULE: MissRuleRow = MissRuleRow {
    name: "light",
    about: "a missing expert with less weight than τ is left out, or the best resident takes its place",
    knobs: &[
        Knob {
            name: "tau",
            about: "the weight from which on an expert is read",
            domain: Domain::Number(0.0..=f64::MAX),
            default: None,
        },
        Knob {
            name: "fill",
            about: "what takes its place: nothing, or the best resident expert, with its own weight",
            domain: Domain::Word(&["none", "resident"]),
            default: Some("none"),
        },
        KEEP,
        PHASE,
    ],
    reads_small_copies: false,
    make: |options| {
        let below = options.required("tau", options.number("tau"))? as f32;
        let fills = options.text("fill") == Some("resident");
        Ok(Box::new(Light { below, fills, keep: Keep::new(options), base: Vec::new(), weights: Vec::new() }))
    },
};

struct Light {
    below: f32,
    fills: bool,
    keep: Keep,
    /// Buffers: the choice before, and weights of one with another expert.
    base: Vec<ExpertId>,
    weights: Vec<f32>,
}

impl MissRule for Light {
    fn gate_error(&self, gate: &Gate) -> Option<String> {
        let mixes = self.fills && matches!(gate.weighting, Weighting::SparseMixer { .. });
        let mixes =
            mixes.then(|| "has fill=resident, but the weights of this model's experts depend on each other".to_owned());
        self.keep.gate_error(gate).or(mixes)
    }

    fn apply(
        &mut self,
        input: &RouterInput,
        ranking: &Ranking,
        present: &dyn Fn(usize) -> bool,
        choice: &mut ExpertChoice,
    ) {
        // One expert is always left.
        let keep = self.keep.of(input.gate.top_k).max(1);
        self.base.clone_from(&choice.experts);
        let (first, first_weight) = (choice.experts[0], choice.weights[0]);
        let (below, weights) = (self.below, &choice.weights);
        let is_light = |at: usize| at >= keep && weights[at].abs() < below && !present(self.base[at].index());
        let light: Vec<bool> = (0..self.base.len()).map(is_light).collect();
        let count = light.iter().filter(|light| **light).count();
        if count == 0 {
            return;
        }
        retain_unmarked(&mut choice.experts, &light);
        retain_unmarked(&mut choice.weights, &light);
        if !self.fills {
            return;
        }
        let free = |expert: &usize| {
            ranking.is_eligible(*expert) && present(*expert) && !self.base.contains(&ExpertId(*expert as u16))
        };
        let fillers: Vec<ExpertId> = ranking.order().filter(free).take(count).map(|e| ExpertId(e as u16)).collect();
        for expert in fillers {
            // Beside the choice as it was, in proportion to its first expert: so the weights of all others stay.
            let mut with = self.base.clone();
            with.push(expert);
            input.gate.weights(input.logits, &with, &mut self.weights);
            let (Some(own), with_first) = (self.weights.last(), self.weights[0]) else { continue };
            let weight = if with_first == 0.0 { 0.0 } else { own * (first_weight / with_first) };
            choice.experts.push(expert);
            choice.weights.push(weight);
        }
        debug_assert_eq!(choice.experts[0], first);
        sort_by_rank(ranking, choice);
    }
}

/// Sorts the experts in the order of the ranking.
fn sort_by_rank(ranking: &Ranking, choice: &mut ExpertChoice) {
    let weight_of = |expert: ExpertId| choice.experts.iter().position(|e| *e == expert).map(|at| choice.weights[at]);
    let all = ranking.order().map(|expert| ExpertId(expert as u16));
    (choice.experts, choice.weights) = all.filter_map(|expert| Some((expert, weight_of(expert)?))).unzip();
}
