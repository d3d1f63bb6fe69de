//! How far a choice changes what a layer computes: by the weights of experts alone, so that it is known without computing.

use larder_core::{ExpertId, Gate};

use super::{ExpertChoice, Ranking};

/// The change of one layer's output for one token, as the squared weights of the experts in which it differs from the model's own.
/// Outputs of different experts are nearly orthogonal, so that their squares add up.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct WeightChange {
    /// Of experts that were left out, that were added, or whose weight is another.
    pub changed: f64,
    /// Of experts that were computed from their smaller copies.
    pub small: f64,
}

larder_core::fieldwise!(WeightChange { changed, small });

/// Compares choices with the model's own; keeps its buffers between calls.
#[derive(Default)]
pub(super) struct ChangeMeter {
    own: Vec<ExpertId>,
    weights: Vec<f32>,
}

impl ChangeMeter {
    /// The change of one choice, against what the gate alone would choose.
    pub fn measure(&mut self, gate: &Gate, logits: &[f32], ranking: &Ranking, choice: &ExpertChoice) -> WeightChange {
        let square = |weight: f32| f64::from(weight) * f64::from(weight);
        let smaller = choice.small.iter().zip(&choice.weights).filter(|(small, _)| **small);
        let small = smaller.map(|(_, weight)| square(*weight)).sum();
        self.own.clear();
        self.own.extend(ranking.order().take(gate.top_k).map(|expert| ExpertId(expert as u16)));
        if self.own == choice.experts {
            return WeightChange { changed: 0.0, small };
        }
        gate.weights(logits, &self.own, &mut self.weights);
        let weight_in = |experts: &[ExpertId], weights: &[f32], expert: &ExpertId| {
            experts.iter().position(|other| other == expert).map(|at| weights[at])
        };
        let of_own = self.own.iter().zip(&self.weights).map(|(expert, weight)| {
            square(weight - weight_in(&choice.experts, &choice.weights, expert).unwrap_or_default())
        });
        let added = choice.experts.iter().zip(&choice.weights).filter(|(expert, _)| !self.own.contains(expert));
        WeightChange { changed: of_own.sum::<f64>() + added.map(|(_, weight)| square(*weight)).sum::<f64>(), small }
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
        let change = |experts: &[u16], weights: &[f32], small: &[bool]| {
            let experts = experts.iter().map(|expert| ExpertId(*expert)).collect();
            let choice = ExpertChoice { experts, weights: weights.to_vec(), small: small.to_vec() };
            ChangeMeter::default().measure(&gate, &logits, &ranking, &choice)
        };
        let close = |found: WeightChange, changed: f64, small: f64| {
            assert!((found.changed - changed).abs() < 1e-6 && (found.small - small).abs() < 1e-6, "{found:?}");
        };
        close(change(&[0, 1], &[0.4, 0.3], &[]), 0.0, 0.0);
        close(change(&[0, 1], &[0.4, 0.3], &[false, true]), 0.0, 0.09);
        close(change(&[0], &[0.4], &[]), 0.09, 0.0);
        close(change(&[0, 2], &[0.4, 0.2], &[]), 0.09 + 0.04, 0.0);
        close(change(&[0, 3], &[0.6, 0.1], &[false, true]), 0.04 + 0.09 + 0.01, 0.01);
    }
}
