//! The engine as the server drives it.

use std::time::{Duration, Instant};

use larder_core::{LayerIdx, MoeRow, Presence};
use larder_engine::{Drafting, LossMeter, QualityCalibration, Routing, SequenceOrigin, lambda_cost_note};
use larder_model::{Decoder, ExpertPath};
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel};
use larder_serve::{EngineStatus, ExpectedLoss, LayerVisit, RoutingChange, RoutingQuality, RoutingRefused};
use serde_json::{Map, Value, json};

use crate::origin::SequenceOrigins;

/// Time between two writes of the hot set.
const HOT_SET_PAUSE: Duration = Duration::from_secs(300);

/// A running engine with its model.
pub struct ServedEngine {
    engine: InferenceEngine,
    model: OpenModel,
    routing: RoutingSpec,
    /// What λ costs, if that was measured.
    calibration: Option<QualityCalibration>,
    origins: SequenceOrigins,
    /// When the hot set was written last.
    hot_set_kept: Instant,
}

impl ServedEngine {
    /// An engine that was just started.
    pub fn new(engine: InferenceEngine, model: OpenModel, routing: RoutingSpec, origins: SequenceOrigins) -> Self {
        let calibration = model.usable_quality_calibration();
        ServedEngine { engine, model, routing, calibration, origins, hot_set_kept: Instant::now() }
    }
}

impl larder_serve::Engine for ServedEngine {
    fn decoder_and_experts(&mut self) -> (&Decoder, &mut dyn ExpertPath) {
        (&self.engine.decoder, &mut self.engine.experts)
    }

    fn step_tokens(&self) -> usize {
        self.engine.prefill_tokens
    }

    fn sequence_bytes(&self, tokens: usize) -> u64 {
        let (pool, memory) = (self.engine.decoder.kv_pool(), &self.model.blueprint.sequence_memory);
        memory.kv_bytes(tokens, self.step_tokens(), pool.format().kind())
            + memory.recurrent_bytes(tokens, &pool.checkpoints())
    }

    fn growth_bytes(&self, from: usize, to: usize, pins: usize) -> u64 {
        let (pool, memory) = (self.engine.decoder.kv_pool(), &self.model.blueprint.sequence_memory);
        memory.growth_bytes((from, to, pins), pool.format().kind(), &pool.checkpoints())
    }

    fn new_sequence(&mut self) {
        self.engine.experts.new_sequence();
    }

    fn idle(&mut self) -> bool {
        if self.hot_set_kept.elapsed() >= HOT_SET_PAUSE {
            self.engine.experts.write_hot_set();
            self.hot_set_kept = Instant::now();
        }
        self.engine.experts.idle()
    }

    fn end(&mut self) {
        self.engine.experts.write_hot_set();
    }

    fn status(&self) -> EngineStatus {
        let experts = &self.engine.experts;
        let quality = experts.routing().and_then(Routing::quality).map(|quality| RoutingQuality {
            agreement: quality.agreement(),
            kept_mass: quality.kept_mass(),
            kl: quality.mean_kl(),
        });
        let (routing, lambda) = (self.routing.to_string(), self.routing.lambda());
        let loss = self.engine.loss_meter().loss();
        let expected = self.routing.quality_budget().and_then(|budget| {
            let mean = experts.routing()?.report()?.predicted_loss.unwrap_or_default();
            Some(ExpectedLoss { budget, mean })
        });
        let (traffic, slots) = (experts.traffic(), experts.slots());
        EngineStatus { traffic, slots, lambda, routing, quality, loss, expected }
    }

    fn set_routing(&mut self, change: &RoutingChange) -> Result<(), RoutingRefused> {
        let routing = match change {
            RoutingChange::Spec(spec) => spec.parse(),
            RoutingChange::Lambda(0.0) => Ok(RoutingSpec::default()),
            RoutingChange::Lambda(lambda) => RoutingSpec::standard_prior().with_lambda(&lambda.to_string()),
        };
        let routing = routing.map_err(|error| RoutingRefused(error.to_string()))?;
        let InferenceEngine { decoder, experts, .. } = &mut self.engine;
        let set = experts.set_routing_strategy(&routing, decoder, &self.model);
        set.map_err(|error| RoutingRefused(format!("{error:#}")))?;
        self.engine.loss_meter().restart();
        self.routing = routing;
        Ok(())
    }

    fn lambda_costs(&self) -> Map<String, Value> {
        let slots = self.engine.experts.slots_per_layer();
        let calibration = self.calibration.as_ref();
        let measured = slots.and_then(|slots| Some(calibration?.lambda_json(slots)));
        let note = slots.and_then(|_| lambda_cost_note(calibration, &self.routing));
        let note = note.map(|note| json!({"cost": note.cost, "warning": note.warning}));
        Map::from_iter([("lambda_costs".into(), measured.into()), ("lambda_cost".into(), note.into())])
    }

    fn loss_meter(&self) -> LossMeter {
        self.engine.loss_meter().clone()
    }

    fn drafting(&self) -> Drafting {
        self.engine.experts.drafting(&self.engine.drafting())
    }

    fn sequence_origin(&self) -> SequenceOrigin {
        self.origins.with(&self.routing)
    }

    fn record_visits(&mut self, on: bool) {
        self.engine.experts.record_visits(on);
    }

    fn take_visits(&mut self) -> Vec<LayerVisit> {
        let rows = self.engine.decoder.geometry().moe_rows();
        let visits = self.engine.experts.take_visits().into_iter();
        let visit = |(layer, visit): (LayerIdx, _)| Some(LayerVisit { row: rows[layer.index()]?, visit });
        visits.filter_map(visit).collect()
    }

    fn resident_experts(&self) -> Vec<Vec<usize>> {
        let geometry = self.engine.decoder.geometry();
        let residency = self.engine.experts.residency();
        let there =
            |row: MoeRow, e: &usize| residency.is_none_or(|all| all.presence(row.expert(*e)) == Presence::Resident);
        let row = |row| (0..geometry.experts).filter(|e| there(row, e)).collect();
        (0..geometry.moe_layers.len()).map(MoeRow).map(row).collect()
    }
}
