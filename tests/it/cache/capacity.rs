//! Slots that grow and shrink between steps: no bit of the output changes, and a replay has the engine's counts.

use larder_core::{CacheScope, Gate, Geometry, LayerIdx, Rng, Trace};
use larder_engine::{CachedPath, Recorder, Session, StreamingPath};
use larder_lab::{Requests, replay_requests};
use larder_model::{ExpertPath, HintSource, ModelError, MoeCall, Routed};
use larder_policy::eviction::{CacheShape, EvictionSpec, POLICIES, PolicyInputs, PolicyNeeds};

use crate::support::rig::{Model, Recorded, model, read_and_write};
use crate::support::{fixture, golden_models};

/// A path whose capacity changes at random before most steps, also several times.
struct Resizing {
    recorded: Recorded,
    random: Rng,
    most: usize,
    first: LayerIdx,
    capacities: Vec<usize>,
}

impl Resizing {
    fn new(model: &Model, path: StreamingPath, most: usize, seed: u64) -> Self {
        let geometry = model.decoder.geometry();
        let recorded = Recorded { path, recorder: Recorder::new(geometry, false) };
        Resizing { recorded, random: Rng::new(seed), most, first: geometry.moe_layers[0], capacities: vec![] }
    }

    /// Changes the capacity up to three times.
    fn change_some(&mut self) {
        for _ in 0..self.random.below(4) {
            let slots = 1 + self.random.below(self.most);
            self.recorded.path.set_capacity(slots);
            self.recorded.recorder.capacity(slots);
            self.capacities.push(slots);
        }
    }

    fn new_sequence(&mut self) {
        self.recorded.path.new_sequence();
        self.recorded.recorder.new_sequence();
    }
}

impl ExpertPath for Resizing {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        if call.layer == self.first {
            self.change_some();
        }
        self.recorded.forward(call, out)
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        self.recorded.path.wants_hint(source, tokens)
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.recorded.path.hint(source, layer, gate, logits);
    }
}

/// The most slots of a pool: one less than there are experts, so that some always pass through.
fn most_slots(geometry: &Geometry, scope: CacheScope) -> usize {
    match scope {
        CacheScope::Layer => geometry.experts - 1,
        CacheScope::Global => geometry.expert_count() - 1,
    }
}

#[test]
fn logits_are_those_of_all_experts_in_memory() {
    let (mut grown, mut shrunk, mut evictions) = (0, 0, 0);
    for (seed, folder) in golden_models().into_iter().enumerate() {
        let model = model(&folder);
        let resident = read_and_write(&mut Session::new(&model.decoder, &mut model.resident(), 100));
        for (reader, prefetch) in [("memory", 0), ("memory", 2), ("uring", 0), ("uring", 1), ("pread", 0)] {
            for scope in [CacheScope::Layer, CacheScope::Global] {
                let most = most_slots(model.decoder.geometry(), scope);
                let Some(path) = model.streaming_with(reader, most, scope, prefetch) else {
                    println!("skipped: the reader {reader} does not work here");
                    continue;
                };
                let mut path = Resizing::new(&model, path, most, seed as u64);
                let found = read_and_write(&mut Session::new(&model.decoder, &mut path, 100));
                assert!(found == resident, "{} with {reader} {scope} {prefetch}", folder.display());
                let changes = || path.capacities.windows(2);
                grown += changes().filter(|pair| pair[0] < pair[1]).count();
                shrunk += changes().filter(|pair| pair[0] > pair[1]).count();
                evictions += path.recorded.path.traffic().counts.evictions;
            }
        }
    }
    assert!(grown > 500 && shrunk > 500 && evictions > 5000, "{grown} grown, {shrunk} shrunk, {evictions} evictions");
}

#[test]
fn a_replay_with_the_recorded_capacities_has_the_engines_counts() {
    let model = model(&fixture("golden/qwen3_moe"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.safetensors");
    for (seed, policy) in POLICIES.iter().filter(|p| p.needs == PolicyNeeds::Nothing).map(|p| p.name).enumerate() {
        for scope in [CacheScope::Layer, CacheScope::Global] {
            let geometry = model.decoder.geometry();
            let most = most_slots(geometry, scope);
            let shape = CacheShape::new(geometry, most, scope);
            let path = model.evicting(policy, &shape, 0, model.memory());
            let mut path = Resizing::new(&model, path, most, 100 + seed as u64);
            // The engine begins with the most slots, which the trace does not say.
            path.recorded.path.set_capacity(2);
            path.recorded.recorder.capacity(2);
            for _ in 0..4 {
                // As while a chat or server waits: before a sequence begins, between two beginnings, and behind them.
                for _ in 0..=path.random.below(2) {
                    path.change_some();
                    path.new_sequence();
                }
                path.change_some();
                read_and_write(&mut Session::new(&model.decoder, &mut path, 100));
            }
            path.change_some();
            let counts = path.recorded.path.traffic().counts;
            path.recorded.recorder.into_trace().unwrap().write(&file).unwrap();
            let trace = Trace::read(&file).unwrap();
            assert!(trace.capacities.len() > 40 && trace.capacities.iter().any(|change| change.before_sequence));
            let requests = Requests::as_recorded(&trace);
            let shape = requests.recorded_shape(&trace, scope, 0).unwrap();
            let spec: EvictionSpec = policy.parse().unwrap();
            let again = replay_requests(&requests, &shape, &spec, &PolicyInputs::default()).unwrap();
            assert_eq!(again.counts, counts, "{policy} {scope}");
            assert!(counts.evictions > 20, "{policy} {scope}: {counts:?}");
        }
    }
}
