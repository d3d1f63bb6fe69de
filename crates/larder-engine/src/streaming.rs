//! Experts that pass through a cache: the path of one token where the model is larger than memory.

use std::sync::Arc;

use larder_cache::{Cache, Traffic, Visit};
use larder_core::{ExpertId, Gate, LayerIdx, Presence, Residency};
use larder_model::{Call, Compute, ExpertPath, ModelError, Routed, Workbench, distinct};
use larder_policy::eviction::{Eviction, Setting};

use crate::cached::Cached;
use crate::routing::{Routing, likeliest};

/// Routes, has the experts brought in, computes each as it is there, and sums in rank order.
pub struct Streaming {
    routing: Routing,
    cache: Cache,
    bench: Workbench,
    prefetch: usize,
}

impl Streaming {
    /// Experts chosen by `routing` from `cache`, computed by `compute`. Of what the next layer will probably choose and
    /// is not there, the `prefetch` likeliest are read ahead.
    pub fn new(routing: Routing, cache: Cache, compute: Arc<Compute>, prefetch: usize) -> Self {
        Streaming { routing, cache, bench: Workbench::new(compute), prefetch }
    }
}

/// The steps of a layer, for who lets others compute some of its experts.
impl Streaming {
    /// The experts of every token of a call.
    pub fn route(&mut self, call: &Call) -> Routed {
        self.routing.route(call, self.cache.row(call.layer), self.cache.residency())
    }

    /// Takes a call's inputs.
    pub fn begin(&mut self, call: &Call, routed: &Routed) {
        self.bench.begin(call, routed, self.cache.layout(call.layer));
    }

    /// Computes some of the experts that the call's tokens chose, distinct and in order of rank.
    pub fn compute(&mut self, call: &Call, routed: &Routed, wanted: &[ExpertId]) -> Result<(), ModelError> {
        let Streaming { cache, bench, .. } = self;
        cache
            .visit(call.layer, wanted, call.logits_of_one(), &mut |layout, group| {
                bench.compute(call, routed, layout, group)
            })
            .map_err(|e| ModelError::Expert(e.to_string()))
    }

    /// Where the outputs of what was computed are.
    pub fn bench(&self) -> &Workbench {
        &self.bench
    }

    /// Whether an expert is in memory.
    pub fn is_resident(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.cache.residency().presence(self.cache.row(layer), expert.index()) == Presence::Resident
    }

    /// Slots into which experts of a layer can be read without another leaving.
    pub fn free_slots(&self, layer: LayerIdx) -> usize {
        self.cache.free_slots(layer)
    }
}

impl Cached for Streaming {
    fn traffic(&self) -> Traffic {
        self.cache.traffic()
    }

    fn last_visit(&self) -> &Visit {
        self.cache.last_visit()
    }

    fn residency(&self) -> &dyn Residency {
        self.cache.residency()
    }

    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn set_routing(&mut self, routing: Routing) {
        self.routing = routing;
    }

    fn setting(&self) -> Setting {
        *self.cache.setting()
    }

    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.cache.set_policies(policies);
    }

    fn new_sequence(&mut self) {
        self.cache.new_sequence();
    }
}

impl ExpertPath for Streaming {
    fn forward(&mut self, call: &Call, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.route(call);
        self.begin(call, &routed);
        self.compute(call, &routed, &distinct(&routed.ids, call.gate.experts))?;
        self.bench.sum(call, &routed, out);
        Ok(routed)
    }

    fn looks_ahead(&self) -> bool {
        self.prefetch > 0
    }

    fn expect(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.cache.expect(layer, &likeliest(gate, logits), self.prefetch);
    }
}
