//! The expert path with two tiers of memory: experts stream from the SSD through main memory to a device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::two_tiers::{CostModel, TierError, TierErrorCause, TierTraffic, TieredCache, TieredCompute};
use larder_cache::{ExpertCache, SlotIndex, Traffic};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};
use larder_model::{
    ChosenOnDevice, ComputeContext, Decoder, DeviceExperts, DeviceMoeCall, DevicePath, ExpertPath, ExpertWorkspace,
    HintSource, ModelError, MoeCall, Routed, Rows, wanted_experts,
};

use crate::paths::cached_path::CachedPath;
use crate::paths::routing::{Routing, top_k_experts};

/// Routes, visits the cache, computes each expert on the CPU or the device, whichever is done sooner, and sums in rank
/// order.
///
/// CPU and device give the same bits, so the choice affects only traffic and time.
pub struct TieredPath {
    routing: Routing,
    cache: TieredCache,
    host: ExpertWorkspace,
    device: Box<dyn DeviceExperts>,
    prefetch: usize,
    /// The layer whose experts on the device were begun before the host knows the choice.
    begun: Option<LayerIdx>,
    /// Time spent only waiting for the device at the ends of layers; none where what follows is begun behind the
    /// experts.
    finishing: Duration,
}

impl TieredPath {
    /// Experts chosen by `routing`, read through `cache`, computed on `compute` or on `device`, which shares the slots
    /// of the cache's device. For each hint, up to `prefetch` of the next layer's predicted experts that are in neither
    /// tier are prefetched, best rank first; 0 turns prefetching off.
    pub fn new(
        routing: Routing,
        cache: TieredCache,
        compute: Arc<ComputeContext>,
        device: Box<dyn DeviceExperts>,
        prefetch: usize,
    ) -> Self {
        let host = ExpertWorkspace::new(compute);
        TieredPath { routing, cache, host, device, prefetch, begun: None, finishing: Duration::ZERO }
    }

    /// Has the device allocate all memory that the model's experts need in calls with at most `tokens` tokens. To be
    /// called before the first forward pass.
    pub fn prepare(&mut self, decoder: &Decoder, tokens: usize) -> Result<(), ModelError> {
        let TieredPath { cache, device, .. } = self;
        decoder.moe_layers().try_for_each(|(layer, gate, act)| device.prepare(cache.layout(layer), act, gate, tokens))
    }

    /// Has the device prepare the slots in memory for its copies, in the background. To be called when everything is
    /// loaded.
    pub fn prepare_slots(&mut self) {
        self.cache.prepare_slots();
    }

    /// The most bytes of the device's memory that were allocated at one time, by all of its users.
    pub fn device_peak_bytes(&self) -> u64 {
        self.cache.device_peak_bytes()
    }

    /// Measured costs of copying and computing an expert.
    pub fn costs(&self) -> &CostModel {
        self.cache.costs()
    }

    /// Computes every expert of a call, on the CPU or on the device. Returns the weighted sums where the device has
    /// begun them; else all outputs are in `host`.
    fn compute(&mut self, call: &MoeCall, routed: &Routed) -> Result<Option<Rows>, ModelError> {
        let TieredPath { cache, host, device, .. } = self;
        host.reserve_outputs(call, routed);
        let mut dispatch = ExpertDispatch { call, routed, host, device: device.as_mut(), started: [false; 2] };
        if self.begun.take() == Some(call.layer) && call.on_device.is_some() {
            dispatch.start_device(cache.layout(call.layer));
        }
        let wanted = wanted_experts(&routed.ids, call.gate.experts);
        let visited = cache.visit(call.layer, &wanted, call.logits_of_one(), &mut dispatch);
        let begun = if visited.is_ok() { dispatch.begin_sum() } else { Ok(None) };
        if let Ok(Some(sums)) = begun {
            return Ok(Some(sums));
        }
        let start = Instant::now();
        // Also after an error: the device must have finished with the slots before they are reused.
        let finished = dispatch.finish();
        self.finishing += start.elapsed();
        visited.map_err(model_error)?;
        begun.and(finished).map(|()| None)
    }
}

impl CachedPath for TieredPath {
    fn cache(&self) -> &dyn ExpertCache {
        &self.cache
    }

    fn cache_mut(&mut self) -> &mut dyn ExpertCache {
        &mut self.cache
    }

    fn traffic(&self) -> Traffic {
        let traffic = self.cache.traffic();
        TierTraffic { computed: traffic.computed + self.finishing, ..traffic }.into()
    }

    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn set_routing(&mut self, routing: Routing) {
        self.routing = routing;
    }
}

impl ExpertPath for TieredPath {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.routing.route(call, (self.cache.row(call.layer), self.cache.residency()), &self.host);
        self.compute(&MoeCall { on_device: None, ..*call }, &routed)?;
        self.host.sum(call, &routed, out);
        Ok(routed)
    }

    fn on_device(&mut self) -> Option<&mut dyn DevicePath> {
        Some(self)
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        // A strategy that looks at residency would choose by what has been read early.
        source == HintSource::LayerBefore && tokens == 1 && self.prefetch > 0 && self.routing.is_lossless()
    }

    fn hint(&mut self, _: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.cache.hint(layer, &top_k_experts(gate, logits), self.prefetch);
    }
}

impl DevicePath for TieredPath {
    fn begin(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<(Routed, Option<Rows>), ModelError> {
        let routed = self.routing.route(call, (self.cache.row(call.layer), self.cache.residency()), &self.host);
        let sums = self.compute(call, &routed)?;
        if sums.is_none() {
            self.host.sum(call, &routed, out);
        }
        Ok((routed, sums))
    }

    fn chooses(&mut self, layer: LayerIdx, gate: &Gate, tokens: usize) -> bool {
        // Asked in this order, as the last question takes the most time.
        self.routing.is_lossless() && self.device.chooses(gate, tokens) && self.cache.slots_of_layer(layer).is_some()
    }

    fn begin_chosen(&mut self, call: &DeviceMoeCall) -> Result<Rows, ModelError> {
        let slots = self.cache.slots_of_layer(call.layer).expect("all experts of the layer are on the device");
        self.device.begin_chosen(call, self.cache.layout(call.layer), &slots)
    }

    fn begin_hits(&mut self, call: &DeviceMoeCall) -> Result<(), ModelError> {
        if !self.routing.is_lossless() || !self.device.chooses(call.gate, call.logits.rows) {
            return Ok(());
        }
        let slots = self.cache.slots_on_device(call.layer);
        if slots.iter().any(Option::is_some) {
            self.device.begin_hits(call, self.cache.layout(call.layer), &slots)?;
            self.begun = Some(call.layer);
        }
        Ok(())
    }

    fn step_begins(&mut self, in_flight: usize) {
        self.device.step_begins(in_flight);
    }

    fn count_chosen(&mut self) {
        for ChosenOnDevice { layer, experts, slots } in self.device.take_chosen() {
            self.cache.computed_on_device(layer, &wanted_experts(&experts, slots.len()), &slots);
        }
    }
}

/// Hands a call's experts to the CPU and to the device, each of which is started with its first expert.
struct ExpertDispatch<'a> {
    call: &'a MoeCall<'a>,
    routed: &'a Routed,
    host: &'a mut ExpertWorkspace,
    device: &'a mut dyn DeviceExperts,
    /// Whether the CPU and the device have been started.
    started: [bool; 2],
}

impl ExpertDispatch<'_> {
    /// Begins the sums on the device, if it has the inputs and computes experts of the call.
    fn begin_sum(&mut self) -> Result<Option<Rows>, ModelError> {
        if self.started[1] && self.call.on_device.is_some() {
            self.device.begin_sum(self.call, self.routed, self.host)
        } else {
            Ok(None)
        }
    }

    fn start_device(&mut self, layout: &ExpertLayout) {
        if !std::mem::replace(&mut self.started[1], true) {
            self.device.begin(self.call, self.routed, layout);
        }
    }

    fn finish(self) -> Result<(), ModelError> {
        if self.started[1] { self.device.finish(&mut |place, output| self.host.put(place, output)) } else { Ok(()) }
    }
}

impl TieredCompute for ExpertDispatch<'_> {
    fn host(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        let start = Instant::now();
        if !std::mem::replace(&mut self.started[0], true) {
            self.host.begin(self.call, self.routed, layout);
        }
        self.host.compute(self.call, self.routed, layout, experts);
        Some(start.elapsed())
    }

    fn device(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        self.start_device(layout);
        self.device.compute(self.call, self.routed, layout, experts)
    }

    fn submit(&mut self) {
        if self.started[1] {
            self.device.submit();
        }
    }
}

fn model_error(error: TierError) -> ModelError {
    match error.cause {
        TierErrorCause::Store(_) => ModelError::Expert(error.into()),
        TierErrorCause::Device(_) => ModelError::Device(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use larder_core::NumberFormat;
    use larder_model::Activation;

    use super::*;

    /// Records the calls it gets.
    #[derive(Default)]
    struct CallRecorder(Vec<&'static str>);

    impl DeviceExperts for CallRecorder {
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
    fn a_device_starts_with_its_first_expert_and_its_outputs_join_those_of_the_cpu() {
        let layout = ExpertLayout::new(8, 8, [NumberFormat::F32; 3], false).unwrap();
        let data = vec![0; layout.bytes];
        let routed = Routed::new([0, 1].map(ExpertId).to_vec(), vec![0.5, 0.25]);
        let gate = Gate::softmax(2, 2, false);
        let (layer, act, x) = (LayerIdx(0), Activation::Silu, [1.0; 8]);
        let call = MoeCall::new(layer, &gate, act, &x, 1);
        for (times, order) in [(0, &[][..]), (2, &["begin", "compute", "compute", "finish"])] {
            let mut host = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
            let mut device = CallRecorder::default();
            host.reserve_outputs(&call, &routed);
            let mut dispatch = ExpertDispatch {
                call: &call,
                routed: &routed,
                host: &mut host,
                device: &mut device,
                started: [false; 2],
            };
            assert!(dispatch.host(&layout, &[(ExpertId(0), &data)]).is_some());
            (0..times).for_each(|_| assert_eq!(dispatch.device(&layout, &[(ExpertId(1), 5)]), None));
            dispatch.finish().unwrap();
            assert_eq!(device.0, order);
            let mut out = [f32::NAN; 8];
            host.sum(&call, &routed, &mut out);
            assert_eq!(out, [if times > 0 { 0.75 } else { 0.0 }; 8]);
        }
    }
}
