//! Experts computed in slots of the device have the bits of experts computed on the CPU.

use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat, RowOrder};
use larder_cuda::{EmulatorFault, Gpu};
use larder_model::{Activation, DeviceExperts};

use crate::common::{LayerCase, Random, emulator, gpu, numbered, upload_experts};

const CLAMPED: Activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 0.8 };
/// Number formats of gate, up and down; whether there are biases; hidden and inter; the activation.
type Case = ([NumberFormat; 3], bool, (usize, usize), Activation);
/// Experts of two matrices, which have the number formats of up and down.
const WITHOUT_GATE: [Case; 5] = [
    ([NumberFormat::Q8_0; 3], false, (96, 64), Activation::Relu2),
    ([NumberFormat::Q4K, NumberFormat::Q4K, NumberFormat::Q8_0], false, (256, 96), Activation::Relu),
    ([NumberFormat::F32; 3], true, (40, 24), Activation::Silu),
    ([NumberFormat::F16, NumberFormat::F16, NumberFormat::Q4_0], true, (33, 32), Activation::Gelu),
    ([NumberFormat::Bf16; 3], false, (17, 9), Activation::GeluTanh),
];
const CASES: [Case; 10] = [
    ([NumberFormat::Q4_0; 3], false, (96, 64), Activation::Silu),
    ([NumberFormat::Q8_0; 3], true, (64, 96), CLAMPED),
    ([NumberFormat::Q4K, NumberFormat::Q4K, NumberFormat::Q6K], false, (256, 256), Activation::Silu),
    ([NumberFormat::Q5K, NumberFormat::Q5K, NumberFormat::Q5K], false, (512, 256), Activation::Relu),
    ([NumberFormat::Q6K, NumberFormat::Q4K, NumberFormat::Q8_0], true, (256, 64), Activation::Silu),
    ([NumberFormat::F32; 3], true, (40, 24), Activation::GeluTanh),
    ([NumberFormat::Bf16; 3], false, (72, 40), Activation::Gelu),
    ([NumberFormat::F16; 3], false, (33, 17), CLAMPED),
    ([NumberFormat::F16, NumberFormat::Q8_0, NumberFormat::F32], true, (64, 24), Activation::Relu),
    ([NumberFormat::Q8_0, NumberFormat::F32, NumberFormat::Q4_0], false, (32, 32), Activation::Silu),
];

fn layout(kinds: [NumberFormat; 3], bias: bool, (hidden, inter): (usize, usize)) -> ExpertLayout {
    ExpertLayout::new(hidden, inter, kinds, bias).unwrap()
}

fn layout_without_gate([_, up, down]: [NumberFormat; 3], bias: bool, (hidden, inter): (usize, usize)) -> ExpertLayout {
    ExpertLayout::new(hidden, inter, [up, down], bias).unwrap()
}

/// Computes each case on a device of its own and on the CPU.
pub fn compare(mut device: impl FnMut(u64) -> Option<Gpu>) {
    for (case, (kinds, bias, shape, act)) in CASES.into_iter().chain(WITHOUT_GATE).enumerate() {
        for (tokens, scales_input, order) in [
            (1, false, RowOrder::Rows8),
            (1, true, RowOrder::Plain),
            (13, false, RowOrder::Plain),
            (11, true, RowOrder::Rows8),
        ] {
            let Some(gpu) = device(case as u64) else { return };
            let mut random = Random::new(case as u64 * 100 + tokens as u64);
            let layout = if case < CASES.len() { layout } else { layout_without_gate };
            let mut layout = layout(kinds, bias, shape);
            let mut experts: Vec<_> = (0..5).map(|_| random.expert(&layout)).collect();
            if order == RowOrder::Rows8 {
                let plain = layout.clone();
                experts.iter_mut().for_each(|data| layout = plain.rearrange(data));
            }
            let layer = LayerCase::new(&mut random, layout, act, tokens, (3, 5), scales_input);
            let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
            upload_experts(&mut link, &layer.layout, &experts);
            let id = |i: usize| (ExpertId(i as u16), i);
            layer.begin(&mut bench, &[&[id(3), id(1)], &[id(0)], &[id(2), id(4)]]);
            let found = layer.finish(&mut bench).unwrap();
            assert!(found == layer.by_cpu(&numbered(&experts)), "{kinds:?}, {act:?}, {tokens} tokens, {order:?}");
            assert!(found.iter().flatten().flatten().any(|bits| *bits != 0), "all outputs are zero");
        }
    }
}

#[test]
fn every_number_format_bias_and_activation_gives_the_same_bits() {
    compare(|seed| emulator(seed).map(gpu));
}

#[test]
fn calls_of_any_size_and_any_number_of_groups_give_the_same_bits() {
    // More than the device executes meanwhile.
    const EXPERTS: usize = 24;
    let Some(emulator) = emulator(3) else { return };
    let (mut random, gpu) = (Random::new(3), gpu(emulator));
    let layout = layout([NumberFormat::Q4_0; 3], false, (64, 64));
    let experts: Vec<_> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
    upload_experts(&mut link, &layout, &experts);
    for tokens in [1, 40, 1, 20, 7, 1] {
        let layer = LayerCase::new(&mut random, layout.clone(), Activation::Silu, tokens, (2, EXPERTS), false);
        // More groups than lists can be in flight, and some experts that no token chose.
        let groups: Vec<_> = (0..EXPERTS).map(|i| [(ExpertId(i as u16), i)]).collect();
        let groups: Vec<&[_]> = groups.iter().map(|group| &group[..]).collect();
        layer.begin(&mut bench, &groups);
        assert!(layer.finish(&mut bench).unwrap() == layer.by_cpu(&numbered(&experts)), "{tokens} tokens");
    }
}

#[test]
fn memory_is_allocated_before_the_first_call() {
    // Enough for each buffer to exceed the least size.
    const TOKENS: usize = 300;
    for case in [0, 1, 5, 9] {
        let (kinds, bias, shape, act) = CASES[case];
        let Some(emulator) = emulator(case as u64) else { return };
        let emulator = Arc::new(emulator);
        let (mut random, gpu) = (Random::new(2), Gpu::with_driver(emulator.clone()).unwrap());
        let layout = layout(kinds, bias, shape);
        let experts: Vec<_> = (0..8).map(|_| random.expert(&layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
        upload_experts(&mut link, &layout, &experts);
        let layer = LayerCase::new(&mut random, layout, act, TOKENS, (4, 8), case % 2 == 1);
        bench.prepare(&layer.layout, act, &layer.gate, TOKENS).unwrap();
        let allocated = emulator.allocated_bytes();
        let group: Vec<_> = (0..8).map(|i| (ExpertId(i), usize::from(i))).collect();
        layer.begin(&mut bench, &[&group]);
        layer.finish(&mut bench).unwrap();
        assert_eq!(emulator.allocated_bytes(), allocated, "{kinds:?}");
    }
}

#[test]
fn only_experts_of_this_call_are_returned() {
    let Some(emulator) = emulator(4) else { return };
    let (mut random, gpu) = (Random::new(4), gpu(emulator));
    let layout = layout([NumberFormat::Q8_0; 3], false, (32, 32));
    let experts: Vec<_> = (0..4).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
    upload_experts(&mut link, &layout, &experts);
    let layer = LayerCase::new(&mut random, layout, Activation::Silu, 9, (2, 4), false);
    layer.begin(&mut bench, &[&[(ExpertId(2), 2)]]);
    let all = numbered(&experts);
    assert!(layer.finish(&mut bench).unwrap() == layer.by_cpu(&all[2..3]));
    layer.begin(&mut bench, &[]);
    assert!(layer.finish(&mut bench).unwrap().iter().all(Option::is_none));
}

#[test]
fn a_layer_takes_three_launches_and_estimates_its_time_from_an_earlier_one() {
    let Some(emulator) = emulator(5) else { return };
    let launch = std::time::Duration::from_millis(3);
    let emulator = Arc::new(emulator.with_times(std::time::Duration::ZERO, 1e15, launch));
    let (mut random, gpu) = (Random::new(5), Gpu::with_driver(emulator.clone()).unwrap());
    let layout = layout([NumberFormat::Q4_0; 3], false, (32, 32));
    let experts: Vec<_> = (0..4).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
    upload_experts(&mut link, &layout, &experts);
    let layer = LayerCase::new(&mut random, layout, Activation::Silu, 1, (4, 4), false);
    let mut took = [None; 4];
    for (group, took) in [&[0, 1, 2, 3][..], &[0, 1], &[0, 1, 2, 3], &[0]].into_iter().zip(&mut took) {
        let group: Vec<_> = group.iter().map(|i| (ExpertId(*i), usize::from(*i))).collect();
        // The first of seven is timed.
        for is_timed in (0..7).map(|i| i == 0) {
            bench.begin(&layer.call(), &layer.routed, &layer.layout);
            let of_earlier = bench.compute(&layer.call(), &layer.routed, &layer.layout, &group);
            *took = if is_timed { of_earlier } else { took.filter(|_| of_earlier.is_none()) };
            layer.finish(&mut bench).unwrap();
        }
    }
    // Three more launches copy inputs, lists and outputs.
    assert_eq!(emulator.launches(), 4 * 7 * (3 + 3));
    // Half as many experts: half the time. A quarter is too different for an estimate.
    let micros = took.map(|took| took.map(|took| (took.as_secs_f64() * 1e6).round() as u64));
    assert_eq!(micros, [None, Some(4500), Some(18000), None]);
}

#[test]
fn a_failure_on_the_device_is_an_error_and_never_wrong_bits() {
    let (mut failed, mut passed) = (0, 0);
    for seed in 0..60 {
        let Some(emulator) = emulator(seed) else { return };
        let emulator = Arc::new(emulator.with_fault(EmulatorFault::Launch, 24));
        let (mut random, gpu) = (Random::new(seed), Gpu::with_driver(emulator.clone()).unwrap());
        let layout = layout([NumberFormat::Q8_0; 3], false, (32, 32));
        let experts: Vec<_> = (0..2).map(|_| random.expert(&layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
        upload_experts(&mut link, &layout, &experts);
        let layer = LayerCase::new(&mut random, layout, Activation::Silu, 2, (2, 2), false);
        layer.begin(&mut bench, &[&[(ExpertId(0), 0)], &[(ExpertId(1), 1)]]);
        let finished = layer.finish(&mut bench);
        assert_eq!(emulator.pending_ops(), 0, "seed {seed}");
        match finished {
            Ok(found) => {
                passed += 1;
                assert!(found == layer.by_cpu(&numbered(&experts)), "seed {seed}");
            }
            Err(e) => {
                failed += 1;
                let message = e.to_string();
                assert!(message.contains("the kernel ") && message.contains("injected fault"), "{message}");
            }
        }
    }
    assert!(failed > 5 && passed > 5, "{failed} failed, {passed} passed");
}

#[test]
fn clamped_experts_of_two_matrices_are_an_error() {
    let Some(emulator) = emulator(6) else { return };
    let layout = ExpertLayout::new(32, 32, [NumberFormat::Q8_0; 2], false).unwrap();
    let (mut bench, gate) = (gpu(emulator).experts(None).unwrap(), Gate::softmax(4, 2, false));
    assert!(bench.prepare(&layout, Activation::Relu2, &gate, 3).is_ok());
    let error = bench.prepare(&layout, CLAMPED, &gate, 3).unwrap_err().to_string();
    assert_eq!(error, "clamped experts without a gate matrix are computed on the CPU only");
}

#[test]
fn biases_that_are_not_f32_are_an_error() {
    let Some(emulator) = emulator(6) else { return };
    let mut layout = layout([NumberFormat::Q8_0; 3], true, (32, 32));
    let (mut bench, gate) = (gpu(emulator).experts(None).unwrap(), Gate::softmax(4, 2, false));
    assert!(bench.prepare(&layout, Activation::Silu, &gate, 3).is_ok());
    layout.bias.as_mut().unwrap().up.kind = NumberFormat::F16;
    let error = bench.prepare(&layout, Activation::Silu, &gate, 3).unwrap_err().to_string();
    assert_eq!(error, "expert biases are f16, but the GPU kernels support only f32");
}

#[test]
fn short_copies_bypass_the_copy_engine() {
    let Some(emulator) = emulator(7) else { return };
    // The copy engine fails, so only copies that use it fail.
    let emulator = emulator.with_fault(EmulatorFault::CopyOut, 1);
    let (mut random, gpu) = (Random::new(7), gpu(emulator));
    // 1024 tokens have 1 MiB of outputs.
    let layout = layout([NumberFormat::Q8_0; 3], false, (256, 32));
    let experts = [random.expert(&layout)];
    let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
    upload_experts(&mut link, &layout, &experts);
    for (tokens, by_kernel) in [(1, true), (1024, true), (1025, false)] {
        let layer = LayerCase::new(&mut random, layout.clone(), Activation::Silu, tokens, (1, 1), false);
        let all = vec![ExpertId(0); tokens];
        let layer = LayerCase { routed: larder_model::Routed { ids: all, ..layer.routed }, ..layer };
        layer.begin(&mut bench, &[&[(ExpertId(0), 0)]]);
        assert_eq!(layer.finish(&mut bench).is_ok(), by_kernel, "{tokens} tokens");
    }
}
