//! Experts in the slots of a device, in memory below it, and on the SSD: the same bits as with every expert in memory.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_cache::Traffic;
use larder_cache::two_tiers::{Direction, FakeDevice, MeasuredCosts, TierShape, TierTraffic};
use larder_core::Xoshiro256;
use larder_core::{CacheScope, MoeRow, Presence};
use larder_engine::{CachedPath, Routing, Session, TieredPath, TokenInput};
use larder_model::{Decoder, ExpertPath, FakeProducts, ModelError};
use larder_policy::eviction::{EvictionSpec, PolicyInputs};
use larder_policy::routing::{RoutingSpec, StrategyInputs};
use larder_store::reader::{FaultTarget, MemoryReader, ReadFault};
use larder_store::{StoreError, StoreErrorKind};

use crate::support::rig::{Model, TOKENS, Tiers, model, open};
use crate::support::{fixture, golden_models};

const ROOMY: u64 = 1 << 30;

/// Everything goes to the device.
const COPY: MeasuredCosts = MeasuredCosts { copy: 0.0, host: 1.0, device: 0.0 };
/// The CPU computes what is in memory.
const HOST: MeasuredCosts = MeasuredCosts { copy: 1.0, host: 0.0, device: 1.0 };
/// Both do, as time goes.
const BOTH: MeasuredCosts = MeasuredCosts { copy: 2e-10, host: 1e-10, device: 1e-11 };

/// Logits of a prompt in pieces of five tokens, and of those that the model writes after it, which come as well.
fn transcript<P: ExpertPath>(decoder: &Decoder, path: &mut P, prompt: &[u32], tokens: usize) -> (Vec<f32>, Vec<u32>) {
    let mut session = Session::new(decoder, path, 200);
    let mut logits = session.forward(&TokenInput::prompt(prompt).in_chunks(5).all_logits(), &mut ()).unwrap();
    let mut written = Vec::new();
    for _ in 0..tokens {
        let last = &logits[logits.len() - decoder.vocab()..];
        let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap() as u32;
        written.push(best);
        logits.extend(session.forward(&TokenInput::decode(&[best]), &mut ()).unwrap());
    }
    (logits, written)
}

/// A device on which nothing fails, with a link as fast as `measured` says.
fn device(measured: &MeasuredCosts) -> FakeDevice {
    FakeDevice::new(ROOMY, 7).link(measured.copy)
}

fn tiers(model: &Model, shape: TierShape, measured: MeasuredCosts, prefetch: usize) -> Tiers {
    Tiers { shape, measured, prefetch, memory: model.memory(), device: device(&measured), failing: 0 }
}

/// One of the 12 pairs of sizes, and everything else by chance.
fn varied(model: &Model, which: usize) -> (Tiers, String) {
    let geometry = model.decoder.geometry();
    let (all, rows) = (geometry.experts, geometry.moe_layers.len());
    let device_slots = [1, geometry.top_k, all / 2, all][which % 4].max(1);
    let host_slots = [0, 1, all / 2][which / 4 % 3];
    let mut random = Xoshiro256::new(which as u64);
    let mut one_of = |choices: usize| (random.bits() % choices as u64) as usize;
    let (scope, times) = [(CacheScope::Layer, 1), (CacheScope::Global, rows)][one_of(2)];
    let passing = [geometry.top_k, 1][one_of(2)];
    let shape = TierShape::new(geometry, scope, device_slots * times, host_slots * times, passing);
    let measured = [COPY, HOST, BOTH][one_of(3)];
    let prefetch = [0, 2][one_of(2)];
    let (queue, late) = (1 + one_of(3), one_of(4) as u64);
    let tiers = tiers(model, shape, measured, prefetch);
    let polled = one_of(4) as u64;
    let (memory, device) = (tiers.memory.capacity(queue).overtaken(late), tiers.device.overtaken(late).polled(polled));
    let what = format!(
        "{which}: {shape:?}, {measured:?}, {prefetch} ahead, a queue of {queue}, {late} late, one of {polled} polls"
    );
    (Tiers { memory, device, ..tiers }, what)
}

/// What passed through both tiers so far.
fn of_tiers(tiered: &TieredPath) -> TierTraffic {
    tiered.traffic().tiers.expect("there are two")
}

#[test]
fn through_any_tiers_come_the_logits_of_all_experts_in_memory() {
    let mut passed = Vec::new();
    for (number, folder) in golden_models().iter().enumerate() {
        let model = model(folder);
        let want = transcript(&model.decoder, &mut model.resident(), &TOKENS, 12);
        let products = Arc::new(FakeProducts::new(ROOMY));
        let on_device = model.decoder_on(products.clone()).unwrap();
        assert!(transcript(&on_device, &mut model.resident(), &TOKENS, 12) == want, "{}", folder.display());
        // All pairs of sizes several times, each model with other settings beside them.
        for which in (0..48).map(|turn| turn + 48 * number) {
            let (tiers, what) = varied(&model, which);
            let mut tiered = model.tiered(tiers);
            let decoder = if which / 12 % 2 == 0 { &model.decoder } else { &on_device };
            let got = transcript(decoder, &mut tiered, &TOKENS, 12);
            assert!(got == want, "{}: {what}", folder.display());
            passed.push(of_tiers(&tiered));
        }
        assert!(products.uploaded() > 4 && products.batches() > 24, "products were computed there");
    }
    let sum = |of: fn(&TierTraffic) -> u64| passed.iter().map(of).sum::<u64>();
    let counts: [fn(&TierTraffic) -> u64; 12] = [
        |t| t.on_device,
        |t| t.on_host,
        |t| t.counts.device_hits,
        |t| t.counts.host_hits,
        |t| t.counts.in_flight_hits,
        |t| t.counts.rereads,
        |t| t.counts.demotions,
        |t| t.counts.free_demotions,
        |t| t.counts.evictions,
        |t| t.counts.useful_prefetches,
        |t| t.prefetch_bytes,
        |t| t.from_device_bytes,
    ];
    assert!(counts.iter().all(|count| sum(*count) > 100), "nothing of it happened: {passed:?}");
}

#[test]
fn a_device_that_overwrites_what_is_computed_with_would_be_seen() {
    let model = model(&fixture("golden/olmoe"));
    let want = transcript(&model.decoder, &mut model.resident(), &TOKENS, 0);
    let shape = TierShape::new(model.decoder.geometry(), CacheScope::Layer, 1, 2, 2);
    for racy in [false, true] {
        let tiers = tiers(&model, shape, COPY, 0);
        let device = if racy { tiers.device.racy() } else { tiers.device };
        let got = transcript(&model.decoder, &mut model.tiered(Tiers { device, ..tiers }), &TOKENS, 0);
        assert_eq!(got != want, racy);
    }
}

#[test]
fn the_demo_model_writes_the_same_words() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let (text, model) =
        (larder_runtime::OpenModel::open(&demo, &Default::default()).unwrap().text_codec().unwrap(), open(&demo));
    let prompt = text.tokenizer.encode("The old man looked at the door, and", false).unwrap();
    let want = transcript(&model.decoder, &mut model.resident(), &prompt, 24);
    let products = model.decoder_on(Arc::new(FakeProducts::new(ROOMY))).unwrap();
    for which in [1, 6, 8, 14, 23] {
        let (tiers, what) = varied(&model, which);
        let mut tiered = model.tiered(tiers);
        let got = transcript(if which % 2 == 0 { &model.decoder } else { &products }, &mut tiered, &prompt, 24);
        assert!(got == want, "{what}");
        assert!(tiered.traffic().counts.misses > 100, "{what}");
    }
}

/// Reads until nothing fails, and says how often something did.
fn patiently(decoder: &Decoder, tiered: &mut TieredPath, is_right: impl Fn(&ModelError) -> bool) -> (Vec<f32>, usize) {
    let mut session = Session::new(decoder, tiered, 200);
    let mut failures = 0;
    loop {
        match session.forward(&TokenInput::prompt(&TOKENS).in_chunks(4).all_logits(), &mut ()) {
            Ok(logits) => return (logits, failures),
            Err(error) => {
                assert!(is_right(&error), "{error:?}");
                assert!(session.tokens().is_empty(), "a failed read leaves no tokens");
                failures += 1;
                assert!(failures < 1000, "it never passes: {error}");
            }
        }
    }
}

/// What can go wrong on an expert's way.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Failing {
    CopiesIn,
    /// Which costs time only: who cannot be copied out is read again.
    CopiesOut,
    Reads,
    Computing,
}

impl Failing {
    fn prepare(self, tiers: Tiers) -> Tiers {
        let Tiers { memory, device, .. } = tiers;
        let (memory, device, failing) = match self {
            Failing::CopiesIn => (memory, device.failing(Direction::ToDevice, 40).failing(Direction::FromDevice, 2), 0),
            Failing::CopiesOut => (memory, device.failing(Direction::FromDevice, 1), 0),
            Failing::Reads => (memory.with_fault(FaultTarget::OneIn(20), ReadFault::Gone, 5), device, 0),
            Failing::Computing => (memory, device, 5),
        };
        Tiers { memory, device, failing, ..tiers }
    }

    /// Whether the error says what it should.
    fn is_told_by(self, error: &ModelError) -> bool {
        let named = |said: &str| said.contains("layer ") && said.contains("expert ");
        let said = error.to_string();
        match (self, error) {
            (Failing::CopiesIn, ModelError::Device(_)) => named(&said) && said.contains("into slot"),
            (Failing::Reads, ModelError::Expert(_)) => named(&said),
            (Failing::Computing, ModelError::Device(_)) => said.contains("layer "),
            _ => false,
        }
    }
}

#[test]
fn after_a_failure_there_is_an_error_or_the_right_result_and_the_next_sequence_is_right() {
    let model = model(&fixture("golden/olmoe"));
    let want = Session::new(&model.decoder, &mut model.resident(), 200)
        .forward(&TokenInput::prompt(&TOKENS).in_chunks(4).all_logits(), &mut ())
        .unwrap();
    for failing in [Failing::CopiesIn, Failing::CopiesOut, Failing::Reads, Failing::Computing] {
        let (mut failures, mut failed_copies) = (0, 0);
        for which in 0..24 {
            let (tiers, what) = varied(&model, which);
            let mut tiered = model.tiered(failing.prepare(tiers));
            for _ in 0..2 {
                tiered.new_sequence();
                let (logits, times) = patiently(&model.decoder, &mut tiered, |e| failing.is_told_by(e));
                assert!(logits == want, "{what}: wrong after {failing:?} failed");
                failures += times;
            }
            failed_copies += of_tiers(&tiered).failed_copies;
        }
        assert_eq!(failures > 5, failing != Failing::CopiesOut, "{failing:?}");
        assert_eq!(failed_copies > 5, matches!(failing, Failing::CopiesIn | Failing::CopiesOut), "{failing:?}");
    }
}

#[test]
fn products_that_a_device_cannot_compute_are_an_error() {
    let model = model(&fixture("golden/deepseek_v2"));
    let want = transcript(&model.decoder, &mut model.resident(), &TOKENS, 0).0;
    let error = model.decoder_on(Arc::new(FakeProducts::new(5000))).err().unwrap();
    assert!(matches!(&error, ModelError::Device(cause) if cause.to_string().contains("does not fit")), "{error:?}");
    let decoder = model.decoder_on(Arc::new(FakeProducts::new(ROOMY).failing(50))).unwrap();
    let mut resident = model.resident();
    let mut session = Session::new(&decoder, &mut resident, 200);
    let (mut failures, mut successes) = (0, 0);
    for _ in 0..20 {
        match session.forward(&TokenInput::prompt(&TOKENS[..3]).in_chunks(3).all_logits(), &mut ()) {
            Ok(logits) => {
                assert!(logits == want[..logits.len()], "wrong after a failure");
                session.rewind(0);
                successes += 1;
            }
            Err(error) => {
                assert!(matches!(error, ModelError::Device(_)), "{error:?}");
                failures += 1;
            }
        }
    }
    assert!(failures > 3 && successes > 3, "{failures} of 20 failed");
}

#[test]
fn a_prior_sees_who_is_in_either_tier() {
    let model = model(&fixture("golden/olmoe"));
    let geometry = model.decoder.geometry();
    let k = geometry.top_k;
    // One on the device may be one of those in memory: together at least as many as a token wants.
    let shape = TierShape::new(geometry, CacheScope::Layer, 1, k, k);
    let run = |spec: &str| {
        let mut tiered = model.tiered(tiers(&model, shape, COPY, 0));
        let router =
            spec.parse::<RoutingSpec>().unwrap().make(&StrategyInputs::of_rows(geometry.moe_layers.len())).unwrap();
        tiered.set_routing(Routing::lossy(router));
        transcript(&model.decoder, &mut tiered, &TOKENS, 0);
        for row in (0..geometry.moe_layers.len()).map(MoeRow) {
            let there = |e: &usize| tiered.residency().presence(row.expert(*e)) == Presence::Resident;
            assert!((0..geometry.experts).filter(there).count() >= k);
        }
        let before = of_tiers(&tiered);
        transcript(&model.decoder, &mut tiered, &TOKENS[..1], 30);
        let TierTraffic { counts, .. } = of_tiers(&tiered) - before;
        (counts.misses, counts.device_hits, counts.host_hits, tiered.routing().quality().unwrap().substituted)
    };
    let (misses, _, _, substituted) = run("prior:lambda=0,phase=all");
    assert!(misses > 0 && substituted == 0, "{misses} {substituted}");
    let (misses, on_device, in_memory, substituted) = run("prior:lambda=1000,phase=all,j=0");
    assert_eq!(misses, 0);
    assert!(on_device > 10 && in_memory > 10 && substituted > 0, "{on_device} {in_memory} {substituted}");
}

#[test]
fn what_passed_and_what_a_layer_found_can_be_looked_at_as_with_one_tier() {
    let model = model(&fixture("golden/olmoe"));
    let geometry = model.decoder.geometry();
    let k = geometry.top_k;
    let mut tiered = model.tiered(tiers(&model, TierShape::new(geometry, CacheScope::Layer, 1, 1, k), BOTH, 2));
    transcript(&model.decoder, &mut tiered, &TOKENS, 0);
    let before = of_tiers(&tiered);
    let policies =
        "lfu".parse::<EvictionSpec>().unwrap().make(&tiered.cache_shape(), &PolicyInputs::default()).unwrap();
    tiered.set_policies(policies);
    transcript(&model.decoder, &mut tiered, &TOKENS[..1], 9);
    let passed = of_tiers(&tiered) - before;
    let wanted = (10 * k * geometry.moe_layers.len()) as u64;
    assert_eq!(passed.counts.wanted(), wanted);
    assert_eq!(passed.on_device + passed.on_host, wanted);
    let seen = Traffic::from(passed);
    assert_eq!(seen.counts.wanted(), wanted);
    assert_eq!(seen.counts.hits, passed.counts.device_hits + passed.counts.host_hits);
    assert!(seen.counts.misses > 0 && seen.counts.evictions > 0 && seen.counts.prefetches > 0 && seen.bytes() > 0);
    assert!(seen.computed.as_nanos() > 0 && seen.read_busy.as_nanos() > 0);
    let visit = tiered.last_visit();
    assert_eq!(visit.hits.len() + visit.in_flight.len() + visit.misses.len(), k);
    assert!(!visit.evicted.is_empty(), "two slots are not enough for {k}");
    assert!(tiered.costs().copy_s(1000) > 0.0);
}

#[test]
fn a_flipped_bit_is_found_before_anybody_computes_with_it() {
    let model = model(&fixture("golden/olmoe"));
    let shape = TierShape::new(model.decoder.geometry(), CacheScope::Layer, 2, 1, 2);
    let memory: MemoryReader = model.memory().with_fault(FaultTarget::OneIn(1), ReadFault::Flipped(4321), 1);
    let faults = memory.faults_injected();
    let mut tiered = model.tiered(Tiers { memory, ..tiers(&model, shape, COPY, 0) });
    let of_a_shard = |error: &ModelError| {
        let said = error.to_string();
        let named_once = matches!(error, ModelError::Expert(_)) && said.matches("checksum").count() == 1;
        named_once && store_error(error).is_some_and(|found| found.kind == StoreErrorKind::Mismatch)
    };
    let (_, failures) = patiently(&model.decoder, &mut tiered, of_a_shard);
    assert_eq!((failures, faults.load(Ordering::Relaxed)), (1, 1));
}

/// The error of the store among the sources of `error`: the command advises by its kind.
fn store_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a StoreError> {
    error.downcast_ref().or_else(|| store_error(error.source()?))
}
