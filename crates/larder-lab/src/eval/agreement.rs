//! Agreement of a routing strategy with the model's own choice of experts.

use larder_cache::{CacheCounts, Ledger, SlotAssignment};
use larder_core::{ExpertId, Gate, Geometry, LayerIdx, MoeRow};
use larder_model::{Routed, Tap};
use larder_policy::eviction::LayerChoice;
use larder_policy::routing::quality::{Quality, QualityMeter};
use larder_policy::routing::{ExpertChoice, Router, RouterInput};

/// A tap on a model with its own routing: makes each choice also with a strategy, and simulates the cache that the
/// strategy would have.
pub struct ShadowRouting<'a> {
    gates: Vec<&'a Gate>,
    rows: MoeRows,
    router: Box<dyn Router>,
    ledger: Ledger,
    assignment: SlotAssignment,
    meter: QualityMeter,
    qualities: Vec<Quality>,
    choice: ExpertChoice,
    /// The router logits of the current pass, by row.
    logits: Vec<Vec<f32>>,
}

impl<'a> ShadowRouting<'a> {
    /// A tap on a model of this geometry whose layers have these `gates`. The caller guarantees that the router
    /// supports them and that the ledger has this geometry.
    pub fn new(geometry: &Geometry, gates: Vec<&'a Gate>, router: Box<dyn Router>, ledger: Ledger) -> Self {
        let (count, rows) = (gates.len(), MoeRows::new(geometry));
        let (assignment, meter, choice) = Default::default();
        let (qualities, logits) = (vec![Quality::default(); count], vec![Vec::new(); count]);
        ShadowRouting { gates, rows, router, ledger, assignment, meter, qualities, choice, logits }
    }

    /// Begins a new sequence in the simulated cache.
    pub fn new_sequence(&mut self) {
        self.ledger.new_sequence();
    }

    /// The quality of the strategy's choices, by row.
    pub fn qualities(&self) -> &[Quality] {
        &self.qualities
    }

    /// The counts of the simulated cache.
    pub fn counts(&self) -> CacheCounts {
        self.ledger.counts()
    }

    /// Makes the choices of a whole pass, token by token, as a cache sees them in decode.
    fn simulate(&mut self, tokens: usize) {
        for token in 0..tokens {
            for row in 0..self.gates.len() {
                self.choose(MoeRow(row), token);
            }
        }
    }

    fn choose(&mut self, row: MoeRow, token: usize) {
        let gate = self.gates[row.index()];
        let logits = &self.logits[row.index()][token * gate.experts..][..gate.experts];
        self.router.choose(&RouterInput { row, gate, logits, decode: true }, &self.ledger, &mut self.choice);
        self.qualities[row.index()] += self.meter.measure(gate, logits, &self.choice.experts);
        let wanted: Vec<usize> = self.choice.experts.iter().map(|e| e.index()).collect();
        let choice = LayerChoice { row, wanted: &wanted, tokens: &vec![1; wanted.len()], logits };
        self.ledger.replay_visit(&choice, &mut self.assignment);
    }
}

impl Tap for ShadowRouting<'_> {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], _: &Routed) {
        let Some(row) = self.rows.of(layer) else { return };
        let row = row.index();
        self.logits[row].clear();
        self.logits[row].extend_from_slice(logits);
        if row + 1 == self.gates.len() {
            self.simulate(logits.len() / self.gates[row].experts);
        }
    }
}

/// A tap on a model that routes by a strategy: compares each choice with the model's own.
pub struct RoutingAgreement<'a> {
    gates: Vec<&'a Gate>,
    rows: MoeRows,
    meter: QualityMeter,
    qualities: Vec<Quality>,
}

impl<'a> RoutingAgreement<'a> {
    /// A tap on a model of this geometry whose layers have these `gates`.
    pub fn new(geometry: &Geometry, gates: Vec<&'a Gate>) -> Self {
        let qualities = vec![Quality::default(); gates.len()];
        RoutingAgreement { gates, rows: MoeRows::new(geometry), meter: QualityMeter::default(), qualities }
    }

    /// The quality of the choices, by row.
    pub fn qualities(&self) -> &[Quality] {
        &self.qualities
    }
}

impl Tap for RoutingAgreement<'_> {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let Some(row) = self.rows.of(layer) else { return };
        let row = row.index();
        let gate = self.gates[row];
        for (logits, ids) in logits.chunks_exact(gate.experts).zip(routed.ids.chunks_exact(gate.top_k)) {
            let used = ids.iter().position(|id| *id == ExpertId::NONE).unwrap_or(ids.len());
            // A token without an expert in this layer has no choice to compare.
            if used > 0 {
                self.qualities[row] += self.meter.measure(gate, logits, &ids[..used]);
            }
        }
    }
}

/// The MoE row of each decoder layer, if it has experts.
pub(super) struct MoeRows(Vec<Option<MoeRow>>);

impl MoeRows {
    pub fn new(geometry: &Geometry) -> Self {
        MoeRows(geometry.moe_rows())
    }

    pub fn of(&self, layer: LayerIdx) -> Option<MoeRow> {
        self.0.get(layer.index()).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use larder_core::CacheScope;
    use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
    use larder_policy::routing::{RoutingSpec, StrategyInputs};

    use super::*;

    fn geometry() -> Geometry {
        Geometry::narrow(3, [1, 2], 4, 1)
    }

    /// Two tokens in one pass: both prefer expert 0, by a wide and by a narrow margin.
    fn watch(tap: &mut dyn Tap) {
        let logits = [4.0, 1.0, 0.0, 0.0, 2.1, 2.0, 0.0, 0.0];
        for layer in 1..3 {
            let routed = Routed::new(vec![ExpertId(0), ExpertId(1)], vec![1.0, 1.0]);
            tap.routed(LayerIdx(layer), &logits, &routed);
        }
    }

    fn shadow<'a>(gate: &'a Gate, spec: &str) -> ShadowRouting<'a> {
        let router = spec.parse::<RoutingSpec>().unwrap().make(&StrategyInputs::of_rows(2)).unwrap();
        let shape = CacheShape::new(&geometry(), 1, CacheScope::Layer);
        let policies = "lru".parse::<EvictionSpec>().unwrap().make(&shape, &PolicyInputs::default()).unwrap();
        ShadowRouting::new(&geometry(), vec![gate; 2], router, Ledger::new(&shape, policies))
    }

    #[test]
    fn a_shadow_simulates_the_cache_of_its_own_choices() {
        let gate = Gate::softmax(4, 1, false);
        let mut own = shadow(&gate, "prior:lambda=0");
        watch(&mut own);
        assert_eq!((own.qualities()[1].substituted, own.counts().misses), (0, 2));
        let mut other = shadow(&gate, "replace:k=1");
        watch(&mut other);
        assert!(other.qualities().iter().all(|q| (q.choices, q.substituted) == (2, 2)));
        assert!(other.qualities()[0].kl > 2.0);
    }

    #[test]
    fn agreement_is_measured_on_the_routed_experts() {
        let gate = Gate::softmax(4, 1, false);
        let mut agreement = RoutingAgreement::new(&geometry(), vec![&gate; 2]);
        watch(&mut agreement);
        assert!(agreement.qualities().iter().all(|q| (q.choices, q.substituted) == (2, 1)));
        let kl = agreement.qualities()[0].kl;
        assert!((kl - 0.1).abs() < 1e-5, "the log of the two probabilities' ratio, not {kl}");
    }
}
