//! Smaller copies of experts, read in place of missing ones.

use larder_cache::Traffic;
use larder_core::{CacheScope, GATES_KEY, NumberFormat};
use larder_engine::{CachedPath, LossMeter, Recorder, Routing, Session, StreamingPath, TokenInput};
use larder_lab::{InitialCache, replay, reroute};
use larder_policy::eviction::{EvictionSpec, PolicyInputs};
use larder_policy::routing::{RoutingSpec, StrategyInputs};
use larder_store::reader::{FaultPlan, FaultTarget, MemoryReader, ReadFault};

use crate::support::fixture;
use crate::support::rig::{Model, Recorded, TOKENS, model_with_shelf};

fn shelved(name: &str) -> Model {
    model_with_shelf(&fixture("golden").join(name), NumberFormat::Q8_0, NumberFormat::Q4_0)
}

fn path(model: &Model, slots: usize, spec: &str, prefetch: usize, memory: MemoryReader) -> StreamingPath {
    let mut path = model.streaming(slots, CacheScope::Layer, prefetch, memory);
    if spec != "original" {
        let router = spec
            .parse::<RoutingSpec>()
            .unwrap()
            .make(&StrategyInputs::of_rows(model.decoder.geometry().moe_layers.len()))
            .unwrap();
        path.set_routing(Routing::lossy(router));
    }
    path
}

fn decode(model: &Model, path: &mut StreamingPath, meter: &LossMeter) -> Vec<f32> {
    let mut session = Session::new(&model.decoder, path, 100).with_meter(meter.clone());
    let tokens = TOKENS.iter().chain(&TOKENS);
    tokens.flat_map(|token| session.forward(&TokenInput::decode(&[*token]), &mut ()).unwrap()).collect()
}

#[test]
fn smaller_copies_are_read_for_missing_experts_of_little_weight() {
    for name in ["olmoe", "qwen3_moe", "deepseek_v3"] {
        let model = shelved(name);
        let k = model.decoder.geometry().top_k;
        let small = larder_store::ExpertSource::layout(
            model.store.small_shards().unwrap(),
            model.decoder.geometry().moe_layers[0],
        )
        .bytes;
        for slots in [1, k, k + 1] {
            let run = |spec: &str, prefetch, queue| {
                let meter = LossMeter::new(1, 1);
                let mut path = path(&model, slots, spec, prefetch, model.memory().overtaken(3).capacity(queue));
                let logits = decode(&model, &mut path, &meter);
                (logits, path.traffic(), meter.loss())
            };
            let (own, traffic, _) = run("original", 0, 8);
            // A threshold of 0, and none.
            let (same, counted, loss) = run("shelf:tau=0", 0, 8);
            assert!(same == own && counted.counts == traffic.counts && counted.small_reads == 0, "{name} {slots}");
            assert_eq!((loss.kl, loss.measured), (0.0, 2 * TOKENS.len() as u64));
            // Of each token and layer, only the best expert is ever admitted.
            let (all, traffic, loss) = run("shelf:tau=1000", 0, 8);
            let Traffic { counts, small_reads, .. } = traffic;
            let layers = 2 * TOKENS.len() as u64 * model.decoder.geometry().moe_layers.len() as u64;
            assert!(counts.wanted() >= layers && small_reads > 0, "{name} {slots}: {counts:?} {small_reads}");
            assert_eq!(counts.wanted() + small_reads, layers * k as u64, "{name} {slots}");
            let expert = model.store.manifest().slot_bytes() as u64;
            assert_eq!(traffic.bytes(), small_reads * small as u64 + counts.misses * expert, "{name} {slots}");
            assert!(loss.kl > 0.0 && all != own, "{name} {slots}: {loss:?}");
            // Some of each; what is read, and when, does not change the text.
            let spec = "prior:lambda=0.1+light:tau=0.05+shelf:tau=0.3";
            let some = run(spec, 0, 8);
            for (prefetch, queue) in [(0, 1), (2, 8), (1, 2)] {
                let other = run(spec, prefetch, queue);
                assert!(other.0 == some.0, "{name} {slots} {prefetch} {queue}");
                assert_eq!((other.1.counts, other.1.small_reads), (some.1.counts, some.1.small_reads));
            }
            if slots > k {
                assert!(some.1.small_reads > 0 && some.1.counts.misses > 0, "{name} {slots}: {:?}", some.1);
            }
        }
    }
}

#[test]
fn a_damaged_smaller_copy_is_an_error_that_names_it() {
    let model = shelved("olmoe");
    let experts = model.decoder.geometry().expert_count();
    let fault = |fault| FaultPlan { target: FaultTarget::Shard(experts + 2), fault, times: u64::MAX };
    for kind in [ReadFault::Flipped(40), ReadFault::Gone] {
        let FaultPlan { target, fault, times } = fault(kind);
        let memory = model.memory().with_fault(target, fault, times);
        let mut path = path(&model, 2, "shelf:tau=1000", 0, memory);
        let mut session = Session::new(&model.decoder, &mut path, 100);
        let mut failed = None;
        for token in TOKENS.iter().chain(&TOKENS) {
            if let Err(error) = session.forward(&TokenInput::decode(&[*token]), &mut ()) {
                failed = Some(error.to_string());
                break;
            }
        }
        let error = failed.expect("some token chooses the expert");
        assert!(error.contains("layer 0, expert 2"), "{error}");
        if matches!(kind, ReadFault::Flipped(_)) {
            assert!(error.contains("experts-small"), "{error}");
        }
        // The cache stays usable.
        path.set_routing(Routing::default());
        Session::new(&model.decoder, &mut path, 100).forward(&TokenInput::prompt(&TOKENS), &mut ()).unwrap();
    }
}

#[test]
fn a_trace_has_what_took_slots_and_replays_with_the_engines_counts() {
    let model = shelved("qwen3_moe");
    let geometry = model.decoder.geometry();
    let slots = geometry.top_k + 1;
    let strategy = "prior:lambda=0.1,phase=all+light:tau=0.05,phase=all+shelf:tau=0.4,phase=all";
    let path = path(&model, slots, strategy, 0, model.memory());
    let mut recorded = Recorded { path, recorder: Recorder::new(geometry, true) };
    let gates: Vec<_> = model.decoder.gates().collect();
    recorded.recorder.set_meta(GATES_KEY, serde_json::to_string(&gates).unwrap());
    let mut session = Session::new(&model.decoder, &mut recorded, 100);
    session.forward(&TokenInput::prompt(&TOKENS), &mut ()).unwrap();
    for token in TOKENS.iter().chain(&TOKENS) {
        session.forward(&TokenInput::decode(&[*token]), &mut ()).unwrap();
    }
    let (traffic, quality) = (recorded.path.traffic(), recorded.path.routing().quality().unwrap());
    let trace = recorded.recorder.into_trace().unwrap();
    trace.check().unwrap();
    assert!(traffic.small_reads > 0 && traffic.counts.misses > 0, "{traffic:?}");
    let (room, lru) = ((slots, CacheScope::Layer, 0), "lru".parse::<EvictionSpec>().unwrap());
    let inputs = PolicyInputs::default();
    let again = replay(&trace, room, &lru, &inputs, InitialCache::Carried).unwrap();
    assert_eq!(again.counts, traffic.counts);
    let chosen = reroute(&trace, room, &lru, &inputs, &strategy.parse().unwrap(), InitialCache::Carried).unwrap();
    assert!(chosen.0.ids == trace.ids);
    assert_eq!(chosen.1, quality);
}
