//! The spread of each layer's router logits, by which the strategy `prior` is scaled.

use larder_core::{ExpertKey, Gate, Geometry, LayerIdx, Presence, Residency};
use larder_model::{Routed, Tap};
use larder_policy::routing::{ExpertChoice, Router, RouterInput, RoutingSpec, StrategyInputs};

use super::agreement::MoeRows;

/// A tap on a model that averages the spread of each layer's router logits, as `prior` does while it runs.
pub struct LogitSpread<'a> {
    gates: Vec<&'a Gate>,
    rows: MoeRows,
    router: Box<dyn Router>,
    choice: ExpertChoice,
}

/// A cache without residents.
struct EmptyCache;

impl Residency for EmptyCache {
    fn presence(&self, _: ExpertKey) -> Presence {
        Presence::Absent
    }
}

impl<'a> LogitSpread<'a> {
    /// A tap on a model of this geometry whose layers have these `gates`.
    pub fn new(geometry: &Geometry, gates: Vec<&'a Gate>) -> Self {
        let spec: RoutingSpec = "prior:lambda=0".parse().expect("the spec is valid");
        let router = spec.make(&StrategyInputs::of_rows(gates.len())).expect("prior with λ = 0 needs no calibration");
        LogitSpread { gates, rows: MoeRows::new(geometry), router, choice: ExpertChoice::default() }
    }

    /// The mean spread so far, by MoE row.
    pub fn delta(&self) -> Vec<f32> {
        self.router.report().delta.iter().map(|d| *d as f32).collect()
    }
}

impl Tap for LogitSpread<'_> {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], _: &Routed) {
        let Some(row) = self.rows.of(layer) else { return };
        let gate = self.gates[row.index()];
        for logits in logits.chunks_exact(gate.experts) {
            self.router.choose(&RouterInput { row, gate, logits, decode: true }, &EmptyCache, &mut self.choice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_is_the_mean_of_each_layer() {
        let gate = Gate::softmax(3, 1, false);
        let mut spread = LogitSpread::new(&Geometry::narrow(3, [0, 2], 3, 1), vec![&gate; 2]);
        spread.routed(LayerIdx(0), &[1.0, 3.0, 0.0, 1.0, 2.0, 2.0], &Routed::default());
        spread.routed(LayerIdx(2), &[-1.0, 4.0, 0.0], &Routed::default());
        let delta = spread.delta();
        assert!((delta[0] - 2.0).abs() < 1e-5 && (delta[1] - 5.0).abs() < 1e-5, "{delta:?}");
    }
}
