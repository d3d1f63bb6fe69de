//! The loss of a lossy strategy's outputs, measured by decoding tokens twice.

use larder_core::{CacheScope, Presence, Residency};
use larder_engine::{CachedPath, LossMeter, OutputLoss, Routing, Session, StreamingPath, TokenInput};
use larder_model::ExpertPath;
use larder_policy::routing::{RoutingSpec, StrategyInputs};

use crate::support::rig::{Model, TOKENS, model};
use crate::support::{fixture, golden_models, larder_ok};

/// A path through one slot more than a token uses, under a strategy that suits the model.
fn path(model: &Model, spec: &str, prefetch: usize) -> Option<StreamingPath> {
    let geometry = model.decoder.geometry();
    let router =
        spec.parse::<RoutingSpec>().unwrap().make(&StrategyInputs::of_rows(geometry.moe_layers.len())).unwrap();
    if !model.decoder.gates().all(|gate| router.supports(gate).is_ok()) {
        return None;
    }
    let mut path = model.streaming(geometry.top_k + 1, CacheScope::Layer, prefetch, model.memory());
    path.set_routing(Routing::lossy(router));
    Some(path)
}

/// The logits of each token, decoded one by one behind a prompt.
fn decode(model: &Model, path: &mut StreamingPath, meter: Option<&LossMeter>) -> Vec<f32> {
    let mut session = Session::new(&model.decoder, path, 100);
    if let Some(meter) = meter {
        session = session.with_meter(meter.clone());
    }
    let mut logits = session.forward(&TokenInput::prompt(&TOKENS), &mut ()).unwrap();
    for token in TOKENS.iter().chain(&TOKENS) {
        logits.extend(session.forward(&TokenInput::decode(&[*token]), &mut ()).unwrap());
    }
    logits
}

fn residents(model: &Model, residency: &dyn Residency) -> Vec<bool> {
    let geometry = model.decoder.geometry();
    let rows = (0..geometry.moe_layers.len()).map(larder_core::MoeRow);
    let keys = rows.flat_map(|row| (0..geometry.experts).map(move |expert| row.expert(expert)));
    keys.map(|key| residency.presence(key) == Presence::Resident).collect()
}

#[test]
fn measuring_changes_nothing_and_finds_nothing_where_nothing_is_lost() {
    let (mut measured, mut lossy) = (0, 0);
    for folder in golden_models() {
        let model = model(&folder);
        for (spec, prefetch) in [("prior:lambda=0", 0), ("prior:lambda=0.7", 0), ("prior:lambda=0.7", 2)] {
            let Some(mut plain) = path(&model, spec, prefetch) else { continue };
            let want = decode(&model, &mut plain, None);
            let (meter, mut twice) = (LossMeter::new(1, 1), path(&model, spec, prefetch).unwrap());
            let what = format!("{} {spec} {prefetch}", folder.display());
            assert!(decode(&model, &mut twice, Some(&meter)) == want, "{what}");
            assert_eq!(twice.traffic().counts, plain.traffic().counts, "{what}");
            if prefetch == 0 {
                // Else it depends on time which of the misses were read ahead.
                assert_eq!(twice.traffic().demand_bytes, plain.traffic().demand_bytes, "{what}");
            }
            assert_eq!(twice.routing().quality(), plain.routing().quality(), "{what}");
            assert!(residents(&model, twice.residency()) == residents(&model, plain.residency()), "{what}");
            let OutputLoss { tokens, measured: found, failed, kl, agreeing, .. } = meter.loss();
            assert_eq!((tokens, found, failed), (2 * TOKENS.len() as u64, tokens, 0), "{what}");
            if spec == "prior:lambda=0" {
                assert_eq!((kl, agreeing), (0.0, found), "{what}");
            } else if twice.routing().quality().unwrap().substituted > 0 {
                assert!(kl > 0.0 && twice.traffic().beside_bytes > 0, "{what}: {:?}", meter.loss());
                lossy += 1;
            }
            measured += found;
        }
    }
    assert!(lossy > 20 && measured > 1000, "{lossy} {measured}");
}

#[test]
fn a_run_measures_within_its_memory_plan_also_where_sequences_cannot_go_back() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["qwen3_next", "granitemoehybrid", "olmoe"] {
        let (golden, store) = (fixture("golden").join(name), dir.path().join(name));
        let (golden, store) = (golden.to_str().unwrap(), store.to_str().unwrap());
        larder_ok(&["convert", golden, store]);
        let prior = ["--routing", "prior:lambda=0.5", "-o", "measure-every=4", "--cache", "3x", "--json"];
        // One page, and several.
        for tokens in ["40", "150"] {
            let run = [&["run", "-m", store, "-p", "the", "-n", tokens, "--ignore-eos"], &prior[..]].concat();
            let found: serde_json::Value = serde_json::from_str(&larder_ok(&run)).unwrap();
            let output = &found["routing"]["output"];
            assert_eq!(output["failed"], 0, "{name}: {output}");
            assert!(
                output["measured"].as_u64().unwrap() >= 9 && output["kl"].as_f64().unwrap() >= 0.0,
                "{name}: {output}"
            );
        }
    }
}

#[test]
fn exact_routing_is_not_measured() {
    let model = model(&golden_models()[0]);
    let mut exact = model.streaming(model.decoder.geometry().top_k + 1, CacheScope::Layer, 0, model.memory());
    assert!(exact.exact().is_none());
    let meter = LossMeter::new(1, 1);
    decode(&model, &mut exact, Some(&meter));
    assert_eq!(meter.loss(), OutputLoss::default());
}
