//! Experts that pass through the memory of a device and that below it: the path of one token where there are two tiers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::tiers::{
    CostModel, TierError, TierErrorCause, TierTraffic, TieredCache, TieredCompute, WantedExpert,
};
use larder_cache::{SlotIndex, Traffic, Visit};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, Residency};
use larder_model::{
    ComputeContext, Decoder, DeviceExperts, ExpertPath, ExpertWorkspace, ModelError, MoeCall, Routed, distinct,
};
use larder_policy::eviction::{CacheShape, Eviction};

use crate::cached_path::CachedPath;
use crate::routing::{Routing, top_k_experts};

/// Routes, has the experts brought in, lets each be computed where that is sooner, and sums in rank order.
///
/// Both sides give the same bits, so which of them computed an expert shows in nothing but the traffic.
pub struct TieredPath {
    routing: Routing,
    cache: TieredCache,
    host: ExpertWorkspace,
    device: Box<dyn DeviceExperts>,
    prefetch: usize,
    /// Time in which nothing was left to do but to wait for what the device computes.
    finishing: Duration,
}

impl TieredPath {
    /// Experts chosen by `routing` from `cache`, computed by `compute` or by `device`, which knows the slots of the
    /// cache's device. Of what the next layer will probably choose and is in neither tier, the `prefetch` likeliest are
    /// read ahead.
    pub fn new(
        routing: Routing,
        cache: TieredCache,
        compute: Arc<ComputeContext>,
        device: Box<dyn DeviceExperts>,
        prefetch: usize,
    ) -> Self {
        TieredPath { routing, cache, host: ExpertWorkspace::new(compute), device, prefetch, finishing: Duration::ZERO }
    }

    /// Has the device make ready for a model's experts, in calls with at most so many tokens; or says what it lacks. To be
    /// asked before anything is computed.
    pub fn prepare(&mut self, decoder: &Decoder, tokens: usize) -> Result<(), ModelError> {
        let TieredPath { cache, device, .. } = self;
        decoder.moe_layers().try_for_each(|(layer, gate, act)| device.prepare(cache.layout(layer), act, gate, tokens))
    }

    /// What copying and computing take.
    pub fn costs(&self) -> &CostModel {
        self.cache.costs()
    }

    /// Has every expert of a call computed, somewhere.
    fn compute(&mut self, call: &MoeCall, routed: &Routed) -> Result<(), ModelError> {
        let TieredPath { cache, host, device, .. } = self;
        host.reserve_outputs(call, routed);
        let mut benches = ExpertDispatch { call, routed, host, device: device.as_mut(), begun: [false; 2] };
        let wanted = wanted(&routed.ids, call.gate.experts);
        let visited = cache.visit(call.layer, &wanted, call.logits_of_one(), &mut benches);
        let start = Instant::now();
        // Also after an error: the device must be through with the slots before they are used for something else.
        let finished = benches.finish();
        self.finishing += start.elapsed();
        visited.map_err(of_the_model)?;
        finished
    }
}

impl CachedPath for TieredPath {
    fn traffic(&self) -> Traffic {
        let traffic = self.cache.traffic();
        TierTraffic { computed: traffic.computed + self.finishing, ..traffic }.into()
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

    fn cache_shape(&self) -> CacheShape {
        self.cache.shape().policy_shape()
    }

    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.cache.set_policies(policies);
    }

    fn new_sequence(&mut self) {
        self.cache.new_sequence();
    }
}

impl ExpertPath for TieredPath {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.routing.route(call, self.cache.row(call.layer), self.cache.residency());
        self.compute(call, &routed)?;
        self.host.sum(call, &routed, out);
        Ok(routed)
    }

    fn wants_hints(&self) -> bool {
        self.prefetch > 0
    }

    fn hint_next(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.cache.hint(layer, &top_k_experts(gate, logits), self.prefetch);
    }
}

/// A call's experts on both benches, each of which begins when it gets its first.
struct ExpertDispatch<'a> {
    call: &'a MoeCall<'a>,
    routed: &'a Routed,
    host: &'a mut ExpertWorkspace,
    device: &'a mut dyn DeviceExperts,
    /// On the CPU, on the device.
    begun: [bool; 2],
}

impl ExpertDispatch<'_> {
    fn finish(self) -> Result<(), ModelError> {
        match self.begun[1] {
            true => self.device.finish(&mut |place, output| self.host.put(place, output)),
            false => Ok(()),
        }
    }
}

impl TieredCompute for ExpertDispatch<'_> {
    fn host(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        let start = Instant::now();
        if !std::mem::replace(&mut self.begun[0], true) {
            self.host.begin(self.call, self.routed, layout);
        }
        self.host.compute(self.call, self.routed, layout, experts);
        Some(start.elapsed())
    }

    fn device(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        if !std::mem::replace(&mut self.begun[1], true) {
            self.device.begin(self.call, self.routed, layout);
        }
        self.device.compute(self.call, self.routed, layout, experts)
    }
}

/// Each expert once, token by token in the order of their rank, and how many tokens chose it.
fn wanted(ids: &[ExpertId], experts: usize) -> Vec<WantedExpert> {
    let mut tokens = vec![0; experts];
    ids.iter().filter(|id| **id != ExpertId::NONE).for_each(|id| tokens[id.index()] += 1);
    let wanted = |expert: ExpertId| WantedExpert { expert, tokens: tokens[expert.index()] };
    distinct(ids, experts).into_iter().map(wanted).collect()
}

fn of_the_model(error: TierError) -> ModelError {
    match error.cause {
        TierErrorCause::Store(_) => ModelError::Expert(error.to_string()),
        TierErrorCause::Device(_) => ModelError::Device(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use larder_core::NumberFormat;
    use larder_model::Activation;

    use super::*;

    /// Writes down what it is asked for.
    #[derive(Default)]
    struct Asked(Vec<&'static str>);

    impl DeviceExperts for Asked {
        fn prepare(&mut self, _: &ExpertLayout, _: Activation, _: &Gate, _: usize) -> Result<(), ModelError> {
            Ok(())
        }

        fn begin(&mut self, _: &MoeCall, _: &Routed, _: &ExpertLayout) {
            self.0.push("begin");
        }

        fn compute(
            &mut self,
            _: &MoeCall,
            _: &Routed,
            _: &ExpertLayout,
            group: &[(ExpertId, usize)],
        ) -> Option<Duration> {
            assert_eq!(group, [(ExpertId(1), 5)]);
            self.0.push("compute");
            None
        }

        fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<(), ModelError> {
            self.0.push("finish");
            put(1, &[3.0; 8]);
            Ok(())
        }
    }

    #[test]
    fn a_bench_begins_when_it_gets_its_first_expert_and_its_outputs_are_put_beside_the_others() {
        let layout = ExpertLayout::new(8, 8, [NumberFormat::F32; 3], false).unwrap();
        let data = vec![0; layout.bytes];
        let routed = Routed { ids: [0, 1].map(ExpertId).to_vec(), weights: vec![0.5, 0.25] };
        let gate = Gate::softmax(2, 2, false);
        let (layer, act, x) = (LayerIdx(0), Activation::Silu, [1.0; 8]);
        let call = MoeCall { layer, gate: &gate, act, logits: &[], x: &x, tokens: 1 };
        for (times, order) in [(0, &[][..]), (2, &["begin", "compute", "compute", "finish"])] {
            let mut host = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
            let mut device = Asked::default();
            host.reserve_outputs(&call, &routed);
            let mut benches = ExpertDispatch {
                call: &call,
                routed: &routed,
                host: &mut host,
                device: &mut device,
                begun: [false; 2],
            };
            assert!(benches.host(&layout, &[(ExpertId(0), &data)]).is_some());
            (0..times).for_each(|_| assert_eq!(benches.device(&layout, &[(ExpertId(1), 5)]), None));
            benches.finish().unwrap();
            assert_eq!(device.0, order);
            let mut out = [f32::NAN; 8];
            host.sum(&call, &routed, &mut out);
            assert_eq!(out, [if times > 0 { 0.75 } else { 0.0 }; 8]);
        }
    }

    #[test]
    fn each_expert_is_wanted_once_for_all_its_tokens() {
        let ids = [2, 0, 0, u16::MAX, 2, 1, 0, 2].map(ExpertId);
        let said: Vec<_> = wanted(&ids, 4).iter().map(|w| (w.expert.0, w.tokens)).collect();
        assert_eq!(said, [(2, 3), (0, 3), (1, 1)]);
    }
}
