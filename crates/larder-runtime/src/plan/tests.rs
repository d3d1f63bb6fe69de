//! Tests of the plan without a GPU.

use larder_core::{ExpertNames, Geometry, SequenceMemory, StepMemory};

use super::reserve::RESERVE_DIVISOR;
use super::*;
use crate::options::{CacheOptions, CacheSize, Options};

pub const MEGA: u64 = 1 << 20;

pub fn blueprint() -> Blueprint {
    Blueprint {
        model_type: "olmoe".into(),
        geometry: Geometry::narrow(4, 0..4, 8, 2),
        experts: ExpertNames::separate("experts", "gate", "up", "down"),
        resident: vec![],
        hidden: 8,
        vocab: 8,
        context: 100,
        sequence_memory: SequenceMemory::rows(1, 1 << 9),
        kv_layers: vec![SequenceMemory::rows(1, 1 << 7); 4],
        step_memory: StepMemory { bytes_per_token: 700, fixed_bytes: 0 },
        attention_heads: 0,
        by_token_bytes: 0,
        runs_ahead: true,
    }
}

/// The available memory of which `bytes` are left beside the reserve.
pub fn beside_reserve(bytes: u64) -> u64 {
    (bytes * RESERVE_DIVISOR).div_ceil(RESERVE_DIVISOR - 1)
}

pub fn options(size: CacheSize, scope: CacheScope) -> Options {
    Options { cache: CacheOptions { size, scope, ..CacheOptions::default() }, ..Options::default() }
}

pub fn inputs(blueprint: &Blueprint, available: Option<u64>) -> PlanInputs<'_> {
    PlanInputs {
        blueprint,
        kv_format: KvFormat::F16,
        resident_bytes: MEGA,
        expert_sizes: ExpertSizes::new([MEGA; 4]),
        scratch_slots: 0,
        context: 1024,
        kv_checkpoints: CheckpointPolicy::default(),
        measures_in_copy: false,
        sequences: 1,
        whole_contexts: 1,
        drafts: 0,
        draft: None,
        vision: None,
        kv_limit_bytes: None,
        prefill_tokens: 1,
        threads: 1,
        process_bytes: MEGA,
        growth_bytes: 0,
        tokenising_bytes_per_token: 0,
        available_bytes: available,
        limit_bytes: available,
        on_gpu: false,
        vram_kv_layers: usize::MAX,
    }
}

#[test]
fn options_go_before_the_available_memory() {
    let blueprint = blueprint();
    let inputs = |available| inputs(&blueprint, available);
    let (layer, global) = (CacheScope::Layer, CacheScope::Global);
    let enough = Some(beside_reserve(40 * MEGA));
    let tight = Some(beside_reserve(12 * MEGA));
    let none = options(CacheSize::Available, layer);
    assert_eq!(decide(&inputs(enough), &none).unwrap(), MemoryPlan::AllResident);
    assert_eq!(decide(&inputs(None), &none).unwrap(), MemoryPlan::AllResident);
    let slots = |slots, scope| MemoryPlan::Slots { slots, scope };
    assert_eq!(decide(&inputs(tight), &none).unwrap(), slots(2, CacheScope::Layer));
    assert_eq!(decide(&inputs(tight), &options(CacheSize::Available, global)).unwrap(), slots(8, CacheScope::Global));
    assert_eq!(
        decide(&inputs(enough), &options(CacheSize::ExpertsPerLayer(3), layer)).unwrap(),
        slots(3, CacheScope::Layer)
    );
    assert_eq!(
        decide(&inputs(enough), &options(CacheSize::ExpertsPerLayer(3), global)).unwrap(),
        slots(12, CacheScope::Global)
    );
    assert_eq!(
        decide(&inputs(enough), &options(CacheSize::Bytes(9 * MEGA), layer)).unwrap(),
        slots(2, CacheScope::Layer),
        "and one that experts pass through"
    );
    let text = decide(&inputs(tight), &options(CacheSize::ExpertsPerLayer(5), layer)).unwrap_err().to_string();
    assert!(text.ends_with("--cache 2x fits"), "{text}");
    assert!(decide(&inputs(Some(MEGA)), &none).unwrap_err().to_string().contains("not enough memory"));
    assert!(
        decide(&inputs(Some(MEGA)), &options(CacheSize::ExpertsPerLayer(5), layer))
            .unwrap_err()
            .to_string()
            .contains("context")
    );
}

#[test]
fn slots_have_the_size_of_their_layer_unless_layers_share_them() {
    let blueprint = blueprint();
    // Experts of layer 0 are three times as large as the others.
    let expert_sizes = ExpertSizes::new([3 * MEGA, MEGA, MEGA, MEGA]);
    let available = Some(beside_reserve(40 * MEGA));
    let classes = PlanInputs { expert_sizes, ..inputs(&blueprint, available) };
    let slots = |inputs: &PlanInputs, scope| match decide(inputs, &options(CacheSize::Bytes(24 * MEGA), scope)) {
        Ok(plan @ MemoryPlan::Slots { slots, .. }) => (slots, plan.expert_bytes(inputs)),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        slots(&classes, CacheScope::Layer),
        (3, 21 * MEGA),
        "one that experts pass through has the largest size"
    );
    assert_eq!(slots(&classes, CacheScope::Global), (7, 24 * MEGA));
    let scratch = PlanInputs { scratch_slots: 1, expert_sizes: classes.expert_sizes.clone(), ..classes };
    assert_eq!(slots(&scratch, CacheScope::Layer), (1, 15 * MEGA));
    let classes = PlanInputs { scratch_slots: 0, ..scratch };
    let text = |scope| {
        let plan = decide(&classes, &options(CacheSize::ExpertsPerLayer(1), scope)).unwrap();
        plan.describe(&classes)
    };
    assert!(text(CacheScope::Layer).contains("slots: 3.15 MB in 1 layer, 1.05 MB in 3"), "{}", text(CacheScope::Layer));
    assert!(text(CacheScope::Global).contains("slots: 3.15 MB each, that of the largest expert"));
    assert_eq!(MemoryPlan::AllResident.expert_bytes(&classes), 8 * 6 * MEGA);
}

#[test]
fn the_total_includes_everything() {
    let blueprint = blueprint();
    let inputs = PlanInputs { sequences: 2, ..inputs(&blueprint, Some(beside_reserve(40 * MEGA))) };
    let plan = decide(&inputs, &options(CacheSize::ExpertsPerLayer(1), CacheScope::Layer)).unwrap();
    // Four slots and one that experts pass through.
    assert_eq!(plan.total_bytes(&inputs), 4 * MEGA + inputs.scratch_bytes() + 5 * MEGA);
    let grown = PlanInputs { growth_bytes: 77, ..inputs.clone() };
    assert_eq!(plan.total_bytes(&grown), plan.total_bytes(&inputs) + 77);
    let text = plan.describe(&inputs);
    assert!(text.contains("experts per layer: at least 2") && text.contains("warning"), "{text}");
    assert!(text.contains("prefill: chunks of up to 1 tokens"), "{text}");
    assert_eq!(plan.json(&inputs)["prefill_tokens"], 1);
}

#[test]
fn a_draft_model_is_part_of_the_plan() {
    let blueprint = blueprint();
    let without = inputs(&blueprint, Some(beside_reserve(40 * MEGA)));
    let draft = Some(DraftMemory { name: "small".into(), bytes: 10 * MEGA });
    let with = PlanInputs { draft, ..without.clone() };
    let automatic = options(CacheSize::Available, CacheScope::Layer);
    let few = decide(&with, &automatic).unwrap();
    assert_eq!(decide(&without, &automatic).unwrap(), MemoryPlan::AllResident);
    assert!(matches!(few, MemoryPlan::Slots { .. }), "{few:?}");
    assert_eq!(few.total_bytes(&with), few.total_bytes(&without) + 10 * MEGA);
    assert!(few.parts(&with).contains(&(MemoryUse::DraftModel, 10 * MEGA)));
    assert!(few.describe(&with).contains(" + 10.5 MB draft model (small) + "), "{}", few.describe(&with));
    assert_eq!(few.json(&with)["draft"], json!({ "name": "small", "bytes": 10 * MEGA }));
    assert_eq!(few.json(&without)["draft"], Value::Null);
    let large = PlanInputs { draft: Some(DraftMemory { name: "large".into(), bytes: 60 * MEGA }), ..without.clone() };
    let text = decide(&large, &automatic).unwrap_err().to_string();
    assert!(text.contains("62.9 MB for the draft model"), "{text}");
}

#[test]
fn scratch_counts_the_tokens_of_a_step_and_the_attention_of_each_thread() {
    let blueprint = blueprint();
    let bytes = |prefill_tokens, threads, context| {
        let inputs = PlanInputs { prefill_tokens, threads, context, ..inputs(&blueprint, None) };
        inputs.scratch_bytes()
    };
    assert_eq!(bytes(300, 1, 64) - bytes(100, 1, 64), 200 * 700);
    // Four units of 16 queries per thread, each with 512 values and its powers for two more position tiles.
    assert_eq!(bytes(1, 3, 1000) - bytes(1, 3, 0), 3 * 4 * 16 * 2 * (512 + 2) * 4);
    assert_eq!(bytes(usize::MAX, usize::MAX, usize::MAX), u64::MAX);
}
