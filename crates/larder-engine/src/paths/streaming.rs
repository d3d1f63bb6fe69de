//! The expert path of a model that is larger than memory: experts stream from the SSD through a cache.

use std::cmp::Reverse;
use std::sync::Arc;

use larder_cache::{Cache, CacheCounts, CacheError, ExpertCache, ExpertUses, Traffic};
use larder_core::{ComputeStage, ExpertId, ExpertKey, ExpertLayout, Gate, LayerIdx, Presence, WantedExpert};
use larder_model::{
    ComputeContext, ExactPath, ExpertPath, ExpertWorkspace, HintSource, ModelError, MoeCall, Routed, wanted_experts,
};
use larder_os::timeline;

use crate::paths::cached_path::CachedPath;
use crate::paths::routing::{Routing, top_k_experts};

/// The fewest tokens of a step whose experts are read ahead. Fewer do not say well enough which experts the next layer
/// will want.
const READ_AHEAD_TOKENS: usize = 8;

/// Routes, visits the cache, computes each expert as soon as it is resident, and sums in rank order.
pub struct StreamingPath {
    routing: Routing,
    cache: Cache,
    workspace: ExpertWorkspace,
    prefetch: usize,
    /// Uses of experts, while they are counted.
    uses: Option<ExpertUses>,
}

impl StreamingPath {
    /// Experts chosen by `routing`, read through `cache`, computed on `compute`. For each hint, up to `prefetch` of the
    /// next layer's predicted experts are prefetched, best rank first; 0 turns prefetching off.
    pub fn new(routing: Routing, cache: Cache, compute: Arc<ComputeContext>, prefetch: usize) -> Self {
        StreamingPath { routing, cache, workspace: ExpertWorkspace::new(compute), prefetch, uses: None }
    }

    /// Has these experts read before the first call, hottest first, by [`read_hot`](Self::read_hot), and counts uses
    /// from now on. `none` is the uses of no call.
    pub fn start_hot(&mut self, hottest: impl IntoIterator<Item = ExpertKey>, none: ExpertUses) {
        self.cache.set_hot(hottest);
        self.uses = Some(none);
    }

    /// Begins no further read of a hot expert, and counts no uses any more.
    pub fn stop_hot(&mut self) {
        self.cache.set_hot([]);
        self.uses = None;
    }

    /// Reads on hot experts, and waits for one read at most; false if there is none to read.
    pub fn read_hot(&mut self) -> bool {
        self.cache.read_hot()
    }

    /// Whether hot experts are left to read.
    pub fn has_hot(&self) -> bool {
        self.cache.has_hot()
    }

    /// Slots of each pool that are in use.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Changes the number of slots of each pool that are in use, between steps; see [`Cache::set_capacity`].
    pub fn set_capacity(&mut self, slots: usize) {
        self.cache.set_capacity(slots);
    }

    /// Bytes of slots that are not in use and still with the process; see [`Cache::kept_bytes`].
    pub fn kept_bytes(&self) -> u64 {
        self.cache.kept_bytes()
    }

    /// For each piece of memory, whether it is of a slot in use; see [`Cache::memory_in_use`].
    pub fn memory_in_use(&self) -> Vec<bool> {
        self.cache.memory_in_use()
    }

    /// Locks the memory of slots that come into use; see [`Cache::lock_slots`].
    pub fn lock_slots(&mut self) {
        self.cache.lock_slots();
    }

    /// The uses of experts by the model's own routing, if they are counted.
    pub fn uses(&self) -> Option<&ExpertUses> {
        self.uses.as_ref()
    }

    fn count(&mut self, call: &MoeCall, routed: &Routed) {
        let Some(uses) = &mut self.uses else { return };
        let row = self.cache.row(call.layer);
        for token in routed.ids.chunks_exact(call.gate.top_k) {
            uses.add(row, token.iter().filter(|expert| **expert != ExpertId::NONE).map(|expert| expert.index()));
        }
    }
}

/// The steps of [`ExpertPath::forward`] one by one, for a path that has some experts computed by other machines.
impl StreamingPath {
    /// Chooses the experts of every token of a call.
    pub fn route(&mut self, call: &MoeCall) -> Routed {
        self.routing.route(call, (self.cache.row(call.layer), self.cache.residency()), &self.workspace)
    }

    /// Starts a call: copies its inputs.
    pub fn begin(&mut self, call: &MoeCall, routed: &Routed) {
        let (layout, small) = (self.cache.layout(call.layer), self.cache.small_layout(call.layer));
        self.workspace.begin_with(call, routed, [Some(layout), small].into_iter().flatten());
    }

    /// Makes some of the call's experts resident and computes them. `wanted` is distinct and in order of first use.
    pub fn compute(&mut self, call: &MoeCall, routed: &Routed, wanted: &[WantedExpert]) -> Result<(), ModelError> {
        let StreamingPath { cache, workspace, .. } = self;
        let mut compute = |layout: &ExpertLayout, stage: ComputeStage, group: &[(ExpertId, &[u8])]| {
            workspace.compute_stage(call, routed, layout, stage, group);
        };
        let failed = |error: CacheError| ModelError::Expert(error.into());
        if routed.small.is_empty() || !cache.has_small() {
            return cache.visit(call.layer, wanted, call.logits_of_one(), &mut compute, call.meanwhile).map_err(failed);
        }
        let (small, whole): (Vec<WantedExpert>, Vec<WantedExpert>) =
            wanted.iter().copied().partition(|wanted| routed.is_small(wanted.expert));
        cache.read_small(call.layer, small.iter().map(|wanted| wanted.expert));
        cache.visit(call.layer, &whole, call.logits_of_one(), &mut compute, call.meanwhile).map_err(failed)?;
        cache.visit_small(call.layer, &small, &mut compute, call.meanwhile).map_err(failed)
    }

    /// The outputs of the computed experts.
    pub fn workspace(&self) -> &ExpertWorkspace {
        &self.workspace
    }

    /// Whether an expert is resident.
    pub fn is_resident(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.cache.residency().presence(self.cache.row(layer).key(expert)) == Presence::Resident
    }

    /// Slots into which experts of a layer can be read without an eviction.
    pub fn free_slots(&self, layer: LayerIdx) -> usize {
        self.cache.free_slots(layer)
    }
}

impl CachedPath for StreamingPath {
    fn cache(&self) -> &dyn ExpertCache {
        &self.cache
    }

    fn cache_mut(&mut self) -> &mut dyn ExpertCache {
        &mut self.cache
    }

    fn traffic(&self) -> Traffic {
        self.cache.traffic()
    }

    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn set_routing(&mut self, routing: Routing) {
        self.routing = routing;
    }
}

impl ExpertPath for StreamingPath {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.route(call);
        self.begin(call, &routed);
        self.compute(call, &routed, &wanted_experts(&routed.ids, call.gate.experts))?;
        self.workspace.sum(call, &routed, out);
        self.count(call, &routed);
        if timeline::is_on() {
            let CacheCounts { hits, misses, evictions, .. } = self.cache.traffic().counts;
            timeline::counter("expert cache", &[("hits", hits), ("misses", misses), ("evictions", evictions)]);
        }
        Ok(routed)
    }

    fn exact(&mut self) -> Option<&mut dyn ExactPath> {
        (!self.routing.is_lossless() && self.cache.has_pass_through()).then_some(self as &mut dyn ExactPath)
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        match (source, tokens) {
            // A strategy that looks at residency may choose others, which is not known before the visit.
            (HintSource::Router, _) => self.routing.is_lossless(),
            (HintSource::LayerBefore, 1) => self.prefetch > 0,
            (HintSource::LayerBefore, many) => many >= READ_AHEAD_TOKENS,
        }
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        match (source, logits.len() / gate.experts) {
            (HintSource::Router, _) => self.cache.read_certain(layer, likely_experts(gate, logits)),
            // What such a strategy sees must not depend on how fast predicted experts are read.
            (HintSource::LayerBefore, 1) if !self.routing.is_lossless() => {
                self.cache.read_predicted(layer, &top_k_experts(gate, logits), self.prefetch);
            }
            (HintSource::LayerBefore, 1) => self.cache.hint(layer, &top_k_experts(gate, logits), self.prefetch),
            (HintSource::LayerBefore, _) => self.cache.read_ahead(layer, likely_experts(gate, logits)),
        }
    }

    fn will_use(&mut self, layer: LayerIdx, gate: &Gate, experts: &[ExpertId]) {
        self.cache.read_certain(layer, most_wanted(experts, gate));
    }
}

impl ExactPath for StreamingPath {
    fn forward_exactly(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.workspace.route(call);
        self.begin(call, &routed);
        let StreamingPath { cache, workspace, .. } = self;
        let mut compute = |layout: &ExpertLayout, stage: ComputeStage, group: &[(ExpertId, &[u8])]| {
            workspace.compute_stage(call, &routed, layout, stage, group);
        };
        cache
            .visit_beside(call.layer, &wanted_experts(&routed.ids, call.gate.experts), &mut compute, call.meanwhile)
            .map_err(|e| ModelError::Expert(e.into()))?;
        self.workspace.sum(call, &routed, out);
        Ok(routed)
    }

    fn loss_measured(&mut self, loss: f64) {
        self.routing.loss_measured(loss);
    }
}

/// The experts that the top k of these router logits `[tokens, experts]` name, those of most tokens first.
fn likely_experts(gate: &Gate, logits: &[f32]) -> impl Iterator<Item = ExpertId> + use<> {
    let chosen: Vec<ExpertId> =
        logits.chunks_exact(gate.experts).flat_map(|logits| top_k_experts(gate, logits)).collect();
    most_wanted(&chosen, gate)
}

/// The distinct ones of these experts, those of most tokens first.
fn most_wanted(chosen: &[ExpertId], gate: &Gate) -> impl Iterator<Item = ExpertId> + use<> {
    let mut wanted = wanted_experts(chosen, gate.experts);
    wanted.sort_by_key(|expert| Reverse(expert.tokens));
    wanted.into_iter().map(|wanted| wanted.expert)
}
