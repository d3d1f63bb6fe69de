//! Routing quality: how far a choice is from the model's own, by the router's probabilities alone.

use larder_core::{ExpertId, Gate};

use super::Ranking;

/// The distance of choices from the model's own, summed over all of them.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Quality {
    /// Number of choices, one for each token and layer.
    pub choices: u64,
    /// Number of experts that the model itself would have chosen.
    pub original_experts: u64,
    /// Number of those that were not chosen.
    pub substituted: u64,
    /// The sum over all choices of the chosen experts' probability, as a share of that of the model's own choice.
    pub kept: f64,
    /// The sum over all choices of the KL divergence, in nats.
    pub kl: f64,
}

larder_core::fieldwise!(Quality { choices, original_experts, substituted, kept, kl });

impl Quality {
    /// The share of the model's own experts that were not chosen.
    pub fn substituted_share(&self) -> f64 {
        self.substituted as f64 / self.original_experts.max(1) as f64
    }

    /// The share of the model's own experts that were chosen.
    pub fn agreement(&self) -> f64 {
        1.0 - self.substituted_share()
    }

    /// The mean share of probability kept; 1 is the model's own choice.
    pub fn kept_mass(&self) -> f64 {
        if self.choices == 0 { 1.0 } else { self.kept / self.choices as f64 }
    }

    /// The mean KL divergence to the model's own choice, in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.choices.max(1) as f64
    }
}

/// Compares choices with the model's own; keeps its buffers between calls.
#[derive(Default)]
pub struct QualityMeter {
    ranking: Ranking,
    shares: Vec<f32>,
}

impl QualityMeter {
    /// The quality of one choice, against what the gate alone would choose from the logits.
    ///
    /// The caller guarantees one logit per expert and distinct experts that exist.
    pub fn measure(&mut self, gate: &Gate, logits: &[f32], chosen: &[ExpertId]) -> Quality {
        self.ranking.rank(gate, logits);
        gate.probabilities(logits, &mut self.shares);
        chosen.iter().for_each(|e| self.ranking.mark(e.index()));
        let Cost { lost, kl } = cost(&self.ranking, gate.top_k, &self.shares);
        let own = self.ranking.order().take(gate.top_k);
        let substituted = own.filter(|e| !self.ranking.is_marked(*e)).count() as u64;
        Quality { choices: 1, original_experts: gate.top_k as u64, substituted, kept: 1.0 - lost, kl }
    }
}

/// The cost of a choice against the model's own.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    /// The share of the own choice's probability that is lost.
    pub lost: f64,
    /// How much farther the chosen experts' probabilities, normalised to sum to 1, are from the router's by the
    /// Kullback-
    /// Leibler divergence than those of the own choice. For any set that divergence is -ln of its probability.
    pub kl: f64,
}

/// The cost of the marked experts. Where the model does not choose by probability, other experts may hold more of it
/// than its own choice; that costs nothing.
pub(super) fn cost(ranking: &Ranking, top_k: usize, shares: &[f32]) -> Cost {
    let mass = |experts: &mut dyn Iterator<Item = usize>| experts.map(|e| f64::from(shares[e])).sum::<f64>();
    if ranking.order().take(top_k).all(|e| ranking.is_marked(e)) {
        return Cost { lost: 0.0, kl: 0.0 };
    }
    let own = mass(&mut ranking.order().take(top_k)).max(f64::MIN_POSITIVE);
    let kept = mass(&mut ranking.order().filter(|e| ranking.is_marked(*e))).max(f64::MIN_POSITIVE);
    let kept = (kept / own).min(1.0);
    Cost { lost: 1.0 - kept, kl: -kept.ln() }
}
