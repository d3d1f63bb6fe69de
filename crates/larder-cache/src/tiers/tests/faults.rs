//! Whatever goes wrong: nothing is computed from wrong bytes, no slot is lost, and the error says whose it is.

use larder_store::reader::{FaultTarget, ReadFault};
use proptest::prelude::*;

use super::*;

/// A layer, the experts that it wants, and those that the next one probably will.
fn wanted() -> impl Strategy<Value = (u16, Vec<u16>, Vec<u16>)> {
    let experts: Vec<u16> = (0..EXPERTS as u16).collect();
    let some = |least| prop::sample::subsequence(experts.clone(), least..=EXPERTS).prop_shuffle();
    (0..LAYERS as u16, some(1), some(0))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_expert_is_computed_once_from_its_bytes_or_the_error_is_clear(
        visits in prop::collection::vec(wanted(), 1..80),
        (device, host, passing, global) in (1usize..8, 0usize..8, 1usize..4, any::<bool>()),
        (queue, late_reads, late_copies, polled) in (1usize..4, 0u64..5, 0u64..5, 0u64..4),
        (bad_reads, bad_ins, bad_outs) in (prop::sample::select(vec![0u32, 4, 20]), prop::sample::select(vec![0u64, 3, 20]), prop::sample::select(vec![0u64, 1, 3])),
        (copy, cpu) in (0u32..4, 0u32..4),
        tokens in 1usize..40,
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let setting = TierSetting::new(&geometry(), scope, device, host, passing);
        let measured = Measured { copy: f64::from(copy), host: f64::from(cpu), device: 0.1 };
        let prepare = |m: MemoryReader| {
            let m = m.capacity(queue).overtaken(late_reads);
            if bad_reads > 0 { m.with_fault(FaultTarget::OneIn(bad_reads), ReadFault::Gone, u64::MAX) } else { m }
        };
        let equip = |d: DeviceDouble| {
            let d = d.overtaken(late_copies).polled(polled).link(f64::from(copy));
            d.failing(Direction::In, bad_ins).failing(Direction::Out, bad_outs)
        };
        let mut bench = Bench::with(&setting, measured, "lru", prepare, equip).unwrap();
        let mut total = 0;
        for (layer, wanted, next) in &visits {
            total += wanted.len() as u64;
            bench.expect((layer + 1) % LAYERS as u16, next, 2);
            match bench.visit(*layer, wanted, tokens) {
                Ok(()) => {}
                Err(TierError { layer: at, expert, cause }) => {
                    prop_assert_eq!(at, LayerIdx(*layer));
                    prop_assert!(wanted.contains(&expert.0));
                    match cause {
                        Cause::Store(_) => prop_assert!(bad_reads > 0),
                        Cause::Device(_) => prop_assert!(bad_ins > 0),
                    }
                }
            }
        }
        let traffic = bench.traffic();
        prop_assert_eq!(traffic.counts.wanted(), total);
        prop_assert!(traffic.counts.useful <= traffic.counts.guesses);
        prop_assert_eq!(traffic.guessed_bytes, traffic.counts.guesses * layout().bytes as u64);
        if bad_reads == 0 && bad_ins == 0 {
            prop_assert_eq!(traffic.on_host + traffic.on_device, total);
        }
        prop_assert!(bad_ins + bad_outs > 0 || traffic.failed_copies == 0);
    }
}

#[test]
fn a_failed_copy_names_the_expert_and_leaves_its_bytes_in_memory() {
    let equip = |d: DeviceDouble| d.failing(Direction::In, 1);
    let mut bench = Bench::with(&setting(CacheScope::Layer, 2, 2), COPY, "lru", |m| m, equip).unwrap();
    for _ in 0..5 {
        let error = bench.visit(1, &[4], 1).unwrap_err();
        let said = "copying 4096 bytes into slot 2 of the device failed: the link is down";
        assert_eq!((error.layer, error.expert, error.cause.to_string()), (LayerIdx(1), ExpertId(4), said.into()));
        assert!(bench.is_in_memory(1, 4));
    }
    let counts = bench.traffic().counts;
    assert_eq!((counts.misses, counts.host_hits, bench.traffic().failed_copies), (1, 4, 5));
}

#[test]
fn a_failed_copy_in_the_background_is_nobodys_error() {
    let equip = |d: DeviceDouble| d.failing(Direction::In, 1);
    let mut bench = Bench::with(&setting(CacheScope::Layer, 2, 3), HOST, "lru", |m| m, equip).unwrap();
    for i in 0..30u16 {
        bench.visit(i % 3, &[i % 4, 5], 1).unwrap();
    }
    assert!(bench.traffic().failed_copies > 10);
    assert_eq!(bench.traffic().on_device, 0);
}

#[test]
fn who_is_wanted_when_a_copy_in_the_background_fails_is_computed_from_memory() {
    let equip = |d: DeviceDouble| d.failing(Direction::In, 1);
    let measured = Measured { copy: 1.5, host: 1.0, device: 0.1 };
    let mut bench = Bench::with(&setting(CacheScope::Layer, 2, 3), measured, "lru", |m| m, equip).unwrap();
    // Had nothing failed, the next time it would be for the device.
    bench.takes[0] = Some(Duration::from_secs(100 * SLOT as u64));
    bench.visit(0, &[0], 1).unwrap();
    bench.takes[0] = None;
    assert!(bench.cache.costs().compute_s(Side::Host, 1, 1) > 1.9);
    bench.visit(0, &[0], 1).unwrap();
    let TierTraffic { counts, on_host, on_device, failed_copies, .. } = bench.traffic();
    assert_eq!((counts.misses, counts.awaited, on_host, on_device, failed_copies), (1, 1, 2, 0, 1));
    assert_eq!(counts.promotions, 2, "the next copy in the background");
    bench.cache.new_sequence();
    bench.visit(0, &[1], 1).unwrap_err();
}

#[test]
fn who_could_not_be_copied_out_is_read_again() {
    let equip = |d: DeviceDouble| d.failing(Direction::Out, 1);
    let mut bench = Bench::with(&setting(CacheScope::Layer, 1, 1), COPY, "lru", |m| m, equip).unwrap();
    for round in 0..5 {
        for expert in 0..3 {
            bench.visit(0, &[expert], 1).unwrap();
        }
        assert!(round == 0 || bench.traffic().failed_copies > 0);
    }
    assert_eq!(bench.traffic().counts.misses, 15);
}

#[test]
fn a_read_that_fails_does_not_stop_what_comes_after() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    for host in [0, 3] {
        let prepare =
            |m: MemoryReader| m.overtaken(2).with_fault(FaultTarget::Shard(broken), ReadFault::Flipped(9), u64::MAX);
        let mut bench =
            Bench::with(&setting(CacheScope::Layer, 2, host), COPY, "lru", prepare, |d| d.overtaken(2)).unwrap();
        for round in 0..20u16 {
            let error = bench.visit(1, &[0, 4, 2], 1).unwrap_err();
            assert_eq!((error.layer, error.expert), (LayerIdx(1), ExpertId(4)));
            assert!(error.to_string().contains("checksum"), "{error}");
            bench.visit(1, &[round % 4, 5, 3 - round % 2], 1).ok();
            bench.visit(1, &[0, 1, 2, 3, 5], 1).unwrap();
        }
    }
}
