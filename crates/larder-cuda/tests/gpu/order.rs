//! Copies wait for kernels. That is not by chance: without events the results are wrong.

use std::panic::AssertUnwindSafe;

use larder_cache::two_tiers::{Device, Direction};
use larder_core::{ExpertId, ExpertLayout, NumberFormat};
use larder_cuda::{Gpu, Stream};
use larder_model::Activation;

use crate::common::{LayerCase, Random, ahead, emulator, gpu, slots, transfer, upload_experts, wait_for_all};
use crate::{expert_choice, hits, link};

/// Replaces experts while they are computed. Returns whether all results are as if each step had waited for the one
/// before.
pub fn results_are_right(gpu: &Gpu, seed: u64) -> bool {
    let mut random = Random::new(seed);
    let layout = ExpertLayout::new(64, 32, [NumberFormat::Q8_0; 3], false).unwrap();
    let mut there: Vec<_> = (0..2).map(|_| random.expert(&layout)).collect();
    let (mut link, mut bench) = (gpu.link(), gpu.experts(None).unwrap());
    upload_experts(&mut link, &layout, &there);
    let mut right = true;
    for round in 0..12 {
        let next: Vec<_> = (0..2).map(|_| random.expert(&layout)).collect();
        let layer = LayerCase::new(&mut random, layout.clone(), Activation::Silu, 3, (2, 2), false);
        let experts: Vec<_> = there.iter().enumerate().map(|(i, data)| (ExpertId(i as u16), data.as_slice())).collect();
        let wanted = layer.by_cpu(&experts);
        layer.begin(&mut bench, &[&[(ExpertId(0), 0)], &[(ExpertId(1), 1)]]);
        // Every expert is copied out and replaced before anything is waited for.
        let empty = slots(&layout, &[vec![0; layout.bytes], vec![0; layout.bytes]]);
        for (at, (out, slot)) in empty.into_iter().zip(slots(&layout, &next)).enumerate() {
            let submitted = if (round + at) % 2 == 0 { transfer } else { ahead };
            link.submit(submitted(Direction::FromDevice, out, at));
            link.submit(submitted(Direction::ToDevice, slot, at));
        }
        right &= layer.finish(&mut bench).unwrap() == wanted;
        for over in wait_for_all(&mut link) {
            over.result.unwrap();
            right &= over.direction == Direction::ToDevice || over.slot[..] == there[over.at][..];
        }
        there = next;
    }
    right
}

#[test]
fn experts_are_replaced_only_after_they_were_computed() {
    for seed in 0..30 {
        let Some(emulator) = emulator(seed) else { return };
        assert!(results_are_right(&gpu(emulator), seed), "seed {seed}");
    }
}

/// A test for each kind of wait, which fails without it.
#[test]
fn no_wait_can_be_left_out() {
    let [compute, copy_in, copy_out, copy_ahead] = Stream::ALL;
    type Check = fn(&Gpu, u64) -> bool;
    let copies: Check = |gpu, seed| std::panic::catch_unwind(AssertUnwindSafe(|| link::play(gpu, seed, false))).is_ok();
    let waits: [(Stream, Stream, Check); 10] = [
        (copy_in, compute, results_are_right),
        (copy_in, compute, expert_choice::results_are_right),
        (copy_in, compute, hits::results_are_right),
        (copy_in, copy_out, copies),
        (copy_out, copy_in, copies),
        (copy_ahead, compute, results_are_right),
        (copy_ahead, copy_in, copies),
        (copy_ahead, copy_out, copies),
        (copy_in, copy_ahead, copies),
        (copy_out, copy_ahead, copies),
    ];
    for (waiting, other, is_right) in waits {
        let mut wrong = 0;
        for seed in 0..20 {
            let Some(emulator) = emulator(seed) else { return };
            assert!(is_right(&gpu(emulator), seed), "{waiting:?} waits for {other:?}, seed {seed}");
            let Some(emulator) = self::emulator(seed) else { return };
            wrong += usize::from(!is_right(&gpu(emulator.ignoring_waits(waiting, other)), seed));
        }
        assert!(wrong > 5, "only {wrong} of 20 were wrong where {waiting:?} did not wait for {other:?}");
    }
}

#[test]
fn without_events_results_are_wrong() {
    let mut wrong = 0;
    for seed in 0..30 {
        let Some(emulator) = emulator(seed) else { return };
        wrong += usize::from(!results_are_right(&gpu(emulator.ignoring_events()), seed));
    }
    assert!(wrong > 10, "only {wrong} of 30 were wrong");
}
