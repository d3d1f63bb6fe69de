//! Routing by the cache, and what is recorded of it.

use larder_cache::Traffic;
use larder_core::{CacheScope, GATES_KEY, Geometry};
use larder_engine::{CachedPath, Recorder, Routing, Session, TokenInput};
use larder_lab::{InitialCache, replay, reroute};
use larder_policy::eviction::{CacheShape, EvictionSpec, POLICIES, PolicyInputs};
use larder_policy::routing::{RoutingSpec, StrategyInputs};

use crate::support::rig::{Model, Recorded, TOKENS, model, read_and_write};
use crate::support::{fixture, golden_models};

/// A strategy, if it suits the model.
fn routing(spec: &str, model: &Model) -> Option<Routing> {
    let router = spec
        .parse::<RoutingSpec>()
        .unwrap()
        .make(&StrategyInputs::of_rows(model.decoder.geometry().moe_layers.len()))
        .unwrap();
    model.decoder.gates().all(|gate| router.supports(gate).is_ok()).then(|| Routing::lossy(router))
}

#[test]
fn strategies_that_change_nothing_change_no_bit() {
    for folder in golden_models() {
        let model = model(&folder);
        let k = model.decoder.geometry().top_k;
        let mut original = model.streaming(k + 1, CacheScope::Layer, 0, model.memory());
        let want = read_and_write(&mut Session::new(&model.decoder, &mut original, 100));
        let specs = ["prior:lambda=0".to_owned(), format!("max-rank:m={k}"), format!("prune:h={k}")];
        let cumsum = ["cumsum:p=0.000001".to_owned(), "prior:lambda=0,delta=token".to_owned()];
        for spec in specs.iter().chain(&cumsum).map(|s| format!("{s},phase=all")) {
            let Some(routing) = routing(&spec, &model) else { continue };
            let mut streaming = model.streaming(k + 1, CacheScope::Layer, 0, model.memory());
            streaming.set_routing(routing);
            let got = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
            assert!(got == want, "{}: {spec}", folder.display());
            let quality = streaming.routing().quality().unwrap();
            assert_eq!((quality.substituted, quality.kl), (0, 0.0), "{}: {spec}", folder.display());
            assert!(quality.choices > 0);
        }
    }
}

#[test]
fn misses_of_a_router_that_reads_before_attention_are_read_meanwhile() {
    for (name, early) in [("smallthinker", true), ("olmoe", false)] {
        let model = model(&fixture("golden").join(name));
        let shape = CacheShape::new(model.decoder.geometry(), model.decoder.geometry().top_k + 1, CacheScope::Layer);
        for (spec, lossless) in [(None, true), (Some("prior:lambda=0.5,phase=all"), false)] {
            let mut path = model.evicting("lru", &shape, 0, model.memory());
            if let Some(routing) = spec.and_then(|spec| routing(spec, &model)) {
                path.set_routing(routing);
            }
            let mut session = Session::new(&model.decoder, &mut path, 100);
            session.forward(&TokenInput::prompt(&TOKENS[..1]), &mut ()).unwrap();
            for token in TOKENS {
                session.forward(&TokenInput::decode(&[token]), &mut ()).unwrap();
            }
            let Traffic { counts, reads_ahead, .. } = path.traffic();
            assert_eq!(reads_ahead.begun > 0, early && lossless, "{name}, {spec:?}: {reads_ahead:?}");
            assert!(
                counts.misses > 0 && reads_ahead.used == reads_ahead.begun && reads_ahead.unused == 0,
                "{name}, {spec:?}: {counts:?} {reads_ahead:?}"
            );
        }
    }
}

#[test]
fn a_bonus_for_what_is_in_memory_saves_reads_and_says_what_it_costs() {
    let model = model(&fixture("golden/olmoe"));
    let slots = model.decoder.geometry().top_k + 1;
    let misses = |spec: &str| {
        let mut streaming = model.streaming(slots, CacheScope::Layer, 0, model.memory());
        streaming.set_routing(routing(spec, &model).unwrap());
        let logits = read_and_write(&mut Session::new(&model.decoder, &mut streaming, 100));
        assert!(logits.iter().all(|l| l.is_finite()));
        (streaming.traffic().counts.misses, streaming.routing().quality().unwrap())
    };
    let ((none, same), (most, other)) = (misses("prior:lambda=0"), misses("prior:lambda=1000"));
    assert!(most < none, "{most} of {none}");
    assert_eq!(same.substituted, 0);
    assert!(other.substituted > 0 && other.kept_mass() < 1.0 && other.mean_kl() > 0.0);
    // Fewer experts than the model has places for.
    assert!(misses("prune:h=1").1.substituted > 0);
}

#[test]
fn prefetches_change_no_choice() {
    let (mut begun, mut used) = (0, 0);
    for name in ["olmoe", "qwen3_moe", "smallthinker"] {
        let model = model(&fixture("golden").join(name));
        let slots = model.decoder.geometry().top_k + 1;
        for scope in [CacheScope::Layer, CacheScope::Global] {
            let run = |prefetch: usize, queue: usize| {
                let slots =
                    if scope == CacheScope::Global { slots * model.decoder.geometry().moe_layers.len() } else { slots };
                let memory = model.memory().overtaken(3).capacity(queue);
                let mut path = model.streaming(slots, scope, prefetch, memory);
                path.set_routing(routing("prior:lambda=0.5", &model).unwrap());
                let mut session = Session::new(&model.decoder, &mut path, 100);
                let logits =
                    TOKENS.map(|token| session.forward(&TokenInput::decode(&[token]), &mut ()).unwrap()).concat();
                let Traffic { counts, reads_ahead, .. } = path.traffic();
                (logits, counts, path.routing().quality().unwrap(), reads_ahead)
            };
            let none = run(0, 8);
            assert!(none.1.misses > 0 && none.2.substituted > 0, "{name}");
            for (prefetch, queue) in [(1, 8), (2, 2), (4, 8)] {
                let ahead = run(prefetch, queue);
                assert!((&ahead.0, ahead.1, ahead.2) == (&none.0, none.1, none.2), "{name}, {prefetch} ahead");
                (begun, used) = (begun + ahead.3.begun, used + ahead.3.used);
            }
        }
    }
    assert!(used > 0 && begun > used, "{used} of {begun} were wanted");
}

#[test]
fn a_replay_of_a_recorded_run_gives_the_engines_counts() {
    let model = model(&fixture("golden/qwen3_moe"));
    let geometry: &Geometry = model.decoder.geometry();
    for policy in POLICIES.iter().filter(|p| !["belady", "learned"].contains(&p.name)) {
        for (slots, scope, scratch) in [
            (1, CacheScope::Layer, 0),
            (3, CacheScope::Layer, 2),
            (2, CacheScope::Global, 0),
            (3, CacheScope::Global, 3),
        ] {
            let light = "prior:lambda=0.1,phase=all+light:tau=0.2,phase=all,fill=resident";
            for strategy in ["original", "prior:lambda=0.5,phase=all", "prune:h=1,phase=all", light] {
                let of_pool = if scope == CacheScope::Global { slots * geometry.moe_layers.len() } else { slots };
                let shape = CacheShape { scratch, ..CacheShape::new(geometry, of_pool, scope) };
                let mut path = model.evicting(policy.name, &shape, 0, model.memory());
                if strategy != "original" {
                    path.set_routing(routing(strategy, &model).unwrap());
                }
                let mut recorded = Recorded { path, recorder: Recorder::new(geometry, true) };
                let gates: Vec<_> = model.decoder.gates().collect();
                recorded.recorder.set_meta(GATES_KEY, serde_json::to_string(&gates).unwrap());
                for _ in 0..2 {
                    recorded.path.new_sequence();
                    recorded.recorder.new_sequence();
                    read_and_write(&mut Session::new(&model.decoder, &mut recorded, 100));
                }
                let trace = recorded.recorder.into_trace().unwrap();
                trace.check().unwrap();
                assert_eq!((trace.tokens(), trace.sequences.len()), (4 * TOKENS.len(), 2));
                let spec: EvictionSpec = policy.name.parse().unwrap();
                let again =
                    replay(&trace, (slots, scope, scratch), &spec, &PolicyInputs::default(), InitialCache::Carried)
                        .unwrap();
                if strategy != "original" {
                    // Choosing again from the same logits beside the same cache is choosing the same.
                    let routing = strategy.parse().unwrap();
                    let room = (slots, scope, scratch);
                    let chosen =
                        reroute(&trace, room, &spec, &PolicyInputs::default(), &routing, InitialCache::Carried)
                            .unwrap();
                    assert!(chosen.0.ids == trace.ids, "{} {strategy}", policy.name);
                    assert_eq!(chosen.1, recorded.path.routing().quality().unwrap());
                }
                let what = format!("{} {slots} {scope} {scratch} {strategy}", policy.name);
                assert_eq!(again.counts, recorded.path.traffic().counts, "{what}");
            }
        }
    }
}
