//! How far a choice changes what a layer computes: by the weights of experts alone, so that it is known without
//! computing.
//!
//! Equal squares do not cost the same: an expert in whose place another is computed loses less than one that is left
//! out. So the two are kept apart.

use larder_core::{ExpertId, Gate};

use super::{ExpertChoice, Ranking};

/// The change of one layer's output for one token, as the squared weights of the experts in which it differs from the
/// model's own. Outputs of different experts are nearly orthogonal, so that their squares add up.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct WeightChange {
    /// Of experts in whose place others are computed, and of those others; with the changes of weights.
    pub substituted: f64,
    /// Of experts in whose place nothing is computed.
    pub left_out: f64,
    /// Of experts that were computed from their smaller copies.
    pub small: f64,
}

larder_core::fieldwise!(WeightChange { substituted, left_out, small });

/// Compares choices with the model's own; keeps its buffers between calls.
#[derive(Default)]
pub(super) struct ChangeMeter {
    own: Vec<ExpertId>,
    weights: Vec<f32>,
}

impl ChangeMeter {
    /// The change of one choice, against what the gate alone would choose. The best of the experts that were left are
    /// those in whose place others are computed.
    pub fn measure(&mut self, gate: &Gate, logits: &[f32], ranking: &Ranking, choice: &ExpertChoice) -> WeightChange {
        let square = |weight: f32| f64::from(weight) * f64::from(weight);
        let smaller = choice.small.iter().zip(&choice.weights).filter(|(small, _)| **small);
        let small = smaller.map(|(_, weight)| square(*weight)).sum();
        let mut change = WeightChange { small, ..WeightChange::default() };
        self.own.clear();
        self.own.extend(ranking.order().take(gate.top_k).map(|expert| ExpertId(expert as u16)));
        if self.own == choice.experts {
            return change;
        }
        gate.weights(logits, &self.own, &mut self.weights);
        let chosen = || choice.experts.iter().zip(&choice.weights);
        let mut others = 0;
        for (_, weight) in chosen().filter(|(expert, _)| !self.own.contains(expert)) {
            change.substituted += square(*weight);
            others += 1;
        }
        for (expert, weight) in self.own.iter().zip(&self.weights) {
            match chosen().find(|(other, _)| *other == expert) {
                Some((_, now)) => change.substituted += square(weight - now),
                None if others > 0 => {
                    change.substituted += square(*weight);
                    others -= 1;
                }
                None => change.left_out += square(*weight),
            }
        }
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_the_squared_distance_of_the_weights() {
        let gate = Gate::softmax(4, 2, false);
        let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
        let mut ranking = Ranking::default();
        ranking.rank(&gate, &logits);
        let close = |experts: &[u16], weights: &[f32], small: &[bool], wanted: [f64; 3]| {
            let experts = experts.iter().map(|expert| ExpertId(*expert)).collect();
            let choice = ExpertChoice { experts, weights: weights.to_vec(), small: small.to_vec() };
            let found = ChangeMeter::default().measure(&gate, &logits, &ranking, &choice);
            let found = [found.substituted, found.left_out, found.small];
            assert!(found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}, not {wanted:?}");
        };
        close(&[0, 1], &[0.4, 0.3], &[], [0.0, 0.0, 0.0]);
        close(&[0, 1], &[0.4, 0.3], &[false, true], [0.0, 0.0, 0.09]);
        close(&[0], &[0.4], &[], [0.0, 0.09, 0.0]);
        close(&[0, 2], &[0.4, 0.2], &[], [0.09 + 0.04, 0.0, 0.0]);
        close(&[0, 3], &[0.6, 0.1], &[false, true], [0.04 + 0.09 + 0.01, 0.0, 0.01]);
        // The better of two is the one that another takes the place of.
        close(&[2], &[0.2], &[], [0.16 + 0.04, 0.09, 0.0]);
    }
}
