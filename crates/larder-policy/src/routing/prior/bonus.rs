//! The bonus for resident experts, and the spread of a layer's values that it is a share of.

use larder_core::{Gate, MoeRow, Score};

use crate::PolicyError;
use crate::routing::{Keep, Ranking, RouterInput, StrategyInputs};
use crate::spec::SpecOptions;

/// A bonus for resident experts, by equations 9 and 10 of "Mixture of Cache-Conditional Experts".
pub struct Prior {
    delta: DeltaSource,
    keep: Keep,
    /// For each row, the number of tokens and the mean of their Δ.
    seen: Vec<(u64, f64)>,
    keys: Vec<(f64, u16)>,
}

/// The source of Δ.
enum DeltaSource {
    Running,
    Token,
    Calibrated(Vec<f64>),
}

impl Prior {
    pub fn new(options: &SpecOptions, inputs: &StrategyInputs) -> Result<Self, PolicyError> {
        let unsuitable = |problem: String| PolicyError::Unsuitable { name: "prior", problem };
        let delta = match options.text("delta") {
            Some("token") => DeltaSource::Token,
            Some("calibrated") => {
                let deltas = inputs
                    .deltas
                    .ok_or_else(|| unsuitable("needs a calibrated Δ, which this model does not have".to_owned()))?;
                if deltas.len() != inputs.rows || !deltas.iter().all(|d| d.is_finite() && *d >= 0.0) {
                    let (got, rows) = (deltas.len(), inputs.rows);
                    let problem = format!("was given {got} calibrated Δ for {rows} layers, or one that is not a scale");
                    return Err(unsuitable(problem));
                }
                DeltaSource::Calibrated(deltas.iter().map(|d| f64::from(*d)).collect())
            }
            _ => DeltaSource::Running,
        };
        Ok(Prior { delta, keep: Keep::new(options), seen: vec![(0, 0.0); inputs.rows], keys: Vec::new() })
    }

    /// With the running mean of Δ.
    pub fn with_running_spread(keep: Keep, rows: usize) -> Self {
        Prior { delta: DeltaSource::Running, keep, seen: vec![(0, 0.0); rows], keys: Vec::new() }
    }

    pub fn gate_error(&self, gate: &Gate) -> Option<String> {
        self.keep.gate_error(gate)
    }

    /// Adds a token to its row's mean spread.
    pub fn observe(&mut self, row: MoeRow, gate: &Gate, ranking: &Ranking) {
        let spread = spread(gate, ranking);
        let (tokens, mean) = &mut self.seen[row.index()];
        *tokens += 1;
        *mean += (spread - *mean) / *tokens as f64;
    }

    /// Marks the `top_k` best after a bonus of λ·Δ for present experts and the first J.
    pub fn select(&mut self, input: &RouterInput, lambda: f64, ranking: &mut Ranking, present: &dyn Fn(usize) -> bool) {
        let delta = match &self.delta {
            DeltaSource::Running => self.seen[input.row.index()].1,
            DeltaSource::Token => spread(input.gate, ranking),
            DeltaSource::Calibrated(deltas) => deltas[input.row.index()],
        };
        let (bonus, keep) = (lambda * delta, self.keep.of(input.gate.top_k));
        self.keys.clear();
        for (rank, expert) in ranking.order().enumerate() {
            let promoted = bonus > 0.0 && (rank < keep || (ranking.is_eligible(expert) && present(expert)));
            let key = key(input.gate, ranking.values()[expert]);
            self.keys.push((if promoted { key + bonus } else { key }, expert as u16));
        }
        // The ranking is in order of value and index, so a stable order among equals is the model's own; sorting by
        // both does not allocate.
        self.keys.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        self.keys[..input.gate.top_k].iter().for_each(|(_, expert)| ranking.mark(usize::from(*expert)));
    }

    pub fn deltas(&self) -> Vec<f64> {
        match &self.delta {
            DeltaSource::Calibrated(deltas) => deltas.clone(),
            DeltaSource::Running | DeltaSource::Token => self.seen.iter().map(|(_, mean)| *mean).collect(),
        }
    }
}

/// Below the logarithm of any probability that does not round to 0.
const LOG_ZERO: f64 = -104.0;

/// The value that a bonus is added to: the logit where the model sorts its softmax, else the value that the model
/// sorts.
/// Logarithms of probabilities are logits up to a constant, and in double precision they sort as the probabilities do.
fn key(gate: &Gate, value: f32) -> f64 {
    match value {
        v if v.is_nan() => f64::NEG_INFINITY,
        v if !sorts_softmax(gate) => f64::from(v),
        v if v > 0.0 => f64::from(v).ln(),
        0.0 => LOG_ZERO,
        _ => f64::NEG_INFINITY,
    }
}

fn sorts_softmax(gate: &Gate) -> bool {
    gate.score == Score::Softmax && gate.bias.is_none()
}

/// The largest less the smallest value among eligible experts.
fn spread(gate: &Gate, ranking: &Ranking) -> f64 {
    let keys = ranking.order().filter(|e| ranking.is_eligible(*e)).map(|e| key(gate, ranking.values()[e]));
    let finite = keys.filter(|k| k.is_finite());
    let (least, most) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), k| (a.min(k), b.max(k)));
    (most - least).max(0.0)
}
