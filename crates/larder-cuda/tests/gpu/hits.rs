//! Experts that are on the device are begun before the host knows that they were chosen.

use std::sync::Arc;

use larder_cache::two_tiers::{Device, Direction};
use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat};
use larder_cuda::{Gpu, GpuExperts, GpuLink, GpuOps};
use larder_model::{Activation, ComputeContext, DeviceExperts, ExpertWorkspace, Ops, Rows, route};

use crate::common::{self, Random, emulator, gpu, numbered, slots, transfer, upload_experts, wait_for_all};
use crate::expert_choice::{Chosen, EXPERTS, HIDDEN, K, Sent, gates, receive, same};

fn ops_of(gpu: &Gpu) -> Arc<GpuOps> {
    Arc::new(gpu.ops(Arc::new(gpu.products(0).unwrap()), Arc::new(gpu.attention().unwrap())).unwrap())
}

/// Begins the experts in these slots, and then waits for what the host chooses by.
fn begin(chosen: &Chosen, bench: &mut GpuExperts, ops: &GpuOps, slots: &[Option<usize>]) -> Sent {
    let sent = chosen.send(ops);
    // A result, as logits are: what was sent is not copied back together with others.
    let x = ops.add(sent.on_device.x, sent.on_device.x, 0.0).unwrap();
    ops.begin_download(&[x]).unwrap();
    bench.begin_hits(&chosen.device_call(sent), chosen.layout, slots).unwrap();
    common::receive(ops, [x]);
    sent
}

/// Computes the call on the host's choice: experts in slots on the device, the others on the CPU.
fn finish(chosen: &Chosen, bench: &mut GpuExperts, sent: Sent, slots: &[Option<usize>], all: &[Vec<u8>]) -> Rows {
    let call = chosen.call(Some(sent.on_device));
    let routed = route(&call);
    let mut host = ExpertWorkspace::new(Arc::new(ComputeContext::new(1, false).unwrap()));
    host.reserve_outputs(&call, &routed);
    bench.begin(&call, &routed, chosen.layout);
    let mut wanted: Vec<ExpertId> = routed.ids.clone();
    wanted.sort_by_key(|id| id.index());
    wanted.dedup();
    let (there, away): (Vec<ExpertId>, Vec<ExpertId>) = wanted.iter().partition(|id| slots[id.index()].is_some());
    let group: Vec<_> = there.iter().map(|id| (*id, slots[id.index()].unwrap())).collect();
    if !group.is_empty() {
        bench.compute(&call, &routed, chosen.layout, &group);
    }
    if !away.is_empty() {
        host.begin(&call, &routed, chosen.layout);
        let away: Vec<_> = away.iter().map(|id| (*id, &all[id.index()][..])).collect();
        host.compute(&call, &routed, chosen.layout, &away);
    }
    bench.begin_sum(&call, &routed, &host).unwrap().expect("inputs are on the device")
}

/// Compares sums for all gates and several layouts, with any experts on the device.
pub fn compare(gpu: &Gpu) {
    let (mut random, ops) = (Random::new(11), ops_of(gpu));
    let layouts = [
        ExpertLayout::new(HIDDEN, 96, [NumberFormat::Q4_0; 3], false).unwrap(),
        ExpertLayout::new(HIDDEN, 64, [NumberFormat::Nvfp4, NumberFormat::F16, NumberFormat::Q4_0], true).unwrap(),
        ExpertLayout::new(HIDDEN, 40, [NumberFormat::F32; 2], true).unwrap(),
    ];
    let gates = gates(&mut random);
    for (i, layout) in layouts.iter().enumerate() {
        let experts: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
        upload_experts(&mut link, layout, &experts);
        for (which, gate) in gates.iter().enumerate() {
            bench.prepare(layout, Activation::Silu, gate, 32).unwrap();
            for (step, tokens) in [1, 4, 32, 1, 4, 17].into_iter().enumerate() {
                let chosen = Chosen::new(&mut random, which as u16, gate, layout, tokens, step > 1);
                // The CPU knows the experts of some layers.
                let knows = i == 1 && which >= gates.len() - 2;
                let chosen = if knows { chosen.with_known(&mut random) } else { chosen };
                let share = [1, 2, 5][random.below(3)];
                let slots: Vec<_> = (0..EXPERTS).map(|slot| (random.below(share) == 0).then_some(slot)).collect();
                let sent = begin(&chosen, &mut bench, &ops, &slots);
                let before = link.work();
                let sums = finish(&chosen, &mut bench, sent, &slots, &experts);
                let work = link.work();
                assert_eq!(work.waits, before.waits, "the host does not wait again");
                assert!(work.launches <= before.launches + 2, "only lists are copied, and sums begun");
                let wanted = chosen.by_cpu(&numbered(&experts)).1;
                assert!(same(&receive(&ops, sums), &wanted), "layout {i}, gate {which}, step {step}");
            }
        }
    }
}

#[test]
fn experts_on_the_device_are_begun_before_the_host_chooses() {
    let Some(emulator) = emulator(5) else { return };
    compare(&gpu(emulator));
}

/// A layer that has all of its experts on the device.
struct Layer {
    random: Random,
    ops: Arc<GpuOps>,
    layout: ExpertLayout,
    gate: Gate,
    experts: Vec<Vec<u8>>,
    link: GpuLink,
    bench: GpuExperts,
    slots: Vec<Option<usize>>,
}

impl Layer {
    fn new(gpu: &Gpu, seed: u64) -> Self {
        let (mut random, ops) = (Random::new(seed), ops_of(gpu));
        let layout = ExpertLayout::new(HIDDEN, 32, [NumberFormat::Q8_0; 3], false).unwrap();
        let gate = Gate::softmax(EXPERTS, K, true);
        let experts: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
        let (mut link, mut bench) = (gpu.link(), gpu.experts(Some(ops.clone())).unwrap());
        upload_experts(&mut link, &layout, &experts);
        bench.prepare(&layout, Activation::Silu, &gate, 4).unwrap();
        Layer { random, ops, layout, gate, experts, link, bench, slots: (0..EXPERTS).map(Some).collect() }
    }
}

/// Replaces experts that were begun. Returns whether results are as if the copies had waited.
pub fn results_are_right(gpu: &Gpu, seed: u64) -> bool {
    let layer = Layer::new(gpu, seed);
    let Layer { mut random, ops, layout, gate, experts: mut there, mut link, mut bench, slots: own } = layer;
    let mut right = true;
    for step in 0..4 {
        let chosen = Chosen::new(&mut random, 0, &gate, &layout, 1, false);
        let wanted = chosen.by_cpu(&numbered(&there)).1;
        let next: Vec<Vec<u8>> = (0..EXPERTS).map(|_| random.expert(&layout)).collect();
        let mut replace = || {
            for (at, slot) in slots(&layout, &next).into_iter().enumerate() {
                link.submit(transfer(Direction::ToDevice, slot, at));
            }
        };
        let sent = begin(&chosen, &mut bench, &ops, &own);
        // Before the host says which it wants, or after.
        if step % 2 == 0 {
            replace();
        }
        let sums = finish(&chosen, &mut bench, sent, &own, &there);
        if step % 2 == 1 {
            replace();
        }
        right &= receive(&ops, sums) == wanted;
        assert!(wait_for_all(&mut link).iter().all(|over| over.result.is_ok()));
        there = next;
    }
    right
}

/// A choice of the host that is not that of the device is an error of the next call, and no wrong text for long.
#[test]
fn choices_that_differ_are_an_error() {
    let Some(emulator) = emulator(8) else { return };
    let gpu = gpu(emulator);
    let layer = Layer::new(&gpu, 9);
    let Layer { mut random, ops, layout, gate, experts, mut bench, slots: own, .. } = layer;
    let first = Chosen::new(&mut random, 0, &gate, &layout, 1, false);
    let sent = begin(&first, &mut bench, &ops, &own);
    // The host has read other logits.
    let other = Chosen::new(&mut random, 0, &gate, &layout, 1, false);
    let sums = finish(&other, &mut bench, sent, &own, &experts);
    receive(&ops, sums);
    let sent = first.send(&ops);
    let error = bench.begin_hits(&first.device_call(sent), &layout, &own).unwrap_err().to_string();
    assert!(error.contains("the GPU and the CPU chose others"), "{error}");
    // Once: the next call is right.
    let sent = begin(&first, &mut bench, &ops, &own);
    let sums = finish(&first, &mut bench, sent, &own, &experts);
    assert_eq!(receive(&ops, sums), first.by_cpu(&numbered(&experts)).1);
}

/// A step that fails after experts were begun leaves nothing behind that a later call would take for its own.
#[test]
fn experts_of_another_call_are_not_taken() {
    let Some(emulator) = emulator(6) else { return };
    let gpu = gpu(emulator);
    let layer = Layer::new(&gpu, 3);
    let Layer { mut random, ops, layout, gate, experts, mut bench, slots: own, .. } = layer;
    for (layer, tokens) in [(1, 1), (0, 2), (0, 1)] {
        let other = Chosen::new(&mut random, layer, &gate, &layout, tokens, false);
        begin(&other, &mut bench, &ops, &own);
        // Rows get the addresses of those of the call before.
        ops.begin_layer();
        let chosen = Chosen::new(&mut random, 0, &gate, &layout, 1, false);
        let sent = chosen.send(&ops);
        let sums = finish(&chosen, &mut bench, sent, &own, &experts);
        assert_eq!(
            receive(&ops, sums),
            chosen.by_cpu(&numbered(&experts)).1,
            "begun for layer {layer}, {tokens} tokens"
        );
    }
}
