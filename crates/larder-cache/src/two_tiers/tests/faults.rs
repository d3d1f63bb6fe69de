//! Tests with faults: nothing is computed from wrong bytes, no slot is lost, and the error names the expert.

use larder_store::reader::{FaultTarget, ReadFault};
use proptest::prelude::*;

use super::*;

/// A layer, the experts that it wants, and a hint for the next layer.
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
        (device, host, scratch, global) in (1usize..8, 0usize..8, 1usize..4, any::<bool>()),
        (queue, late_reads, late_copies, polled) in (1usize..4, 0u64..5, 0u64..5, 0u64..4),
        (bad_reads, bad_ins, bad_outs) in (prop::sample::select(vec![0u32, 4, 20]), prop::sample::select(vec![0u64, 3, 20]), prop::sample::select(vec![0u64, 1, 3])),
        (copy, cpu) in (0u32..4, 0u32..4),
        tokens in 1usize..40,
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let shape = TierShape::new(&geometry(), scope, device, host, scratch);
        let measured = MeasuredCosts { copy: f64::from(copy), host: f64::from(cpu), device: 0.1 };
        let prepare = |m: MemoryReader| {
            let m = m.capacity(queue).overtaken(late_reads);
            if bad_reads > 0 { m.with_fault(FaultTarget::OneIn(bad_reads), ReadFault::Gone, u64::MAX) } else { m }
        };
        let equip = |d: FakeDevice| {
            let d = d.overtaken(late_copies).polled(polled).link(f64::from(copy));
            d.failing(Direction::ToDevice, bad_ins).failing(Direction::FromDevice, bad_outs)
        };
        let mut fixture = Fixture::with(&shape, measured, "lru", prepare, equip).unwrap();
        let mut total = 0;
        for (layer, wanted, next) in &visits {
            total += wanted.len() as u64;
            fixture.hint((layer + 1) % LAYERS as u16, next, 2);
            match fixture.visit(*layer, wanted, tokens) {
                Ok(()) => {}
                Err(TierError { layer: at, expert, cause }) => {
                    prop_assert_eq!(at, LayerIdx(*layer));
                    prop_assert!(wanted.contains(&expert.0));
                    match cause {
                        TierErrorCause::Store(_) => prop_assert!(bad_reads > 0),
                        TierErrorCause::Device(_) => prop_assert!(bad_ins > 0),
                    }
                }
            }
        }
        let traffic = fixture.traffic();
        prop_assert_eq!(traffic.counts.wanted(), total);
        prop_assert!(traffic.counts.useful_prefetches <= traffic.counts.prefetches);
        prop_assert_eq!(traffic.prefetch_bytes, traffic.counts.prefetches * layout().bytes as u64);
        if bad_reads == 0 && bad_ins == 0 {
            prop_assert_eq!(traffic.on_host + traffic.on_device, total);
        }
        prop_assert!(bad_ins + bad_outs > 0 || traffic.failed_copies == 0);
    }
}

#[test]
fn a_failed_copy_names_the_expert_and_leaves_its_bytes_in_memory() {
    let equip = |d: FakeDevice| d.failing(Direction::ToDevice, 1);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 2), COPY, "lru", |m| m, equip).unwrap();
    for _ in 0..5 {
        let error = fixture.visit(1, &[4], 1).unwrap_err();
        let message = "copying 12288 bytes into slot 2 of the device failed: the link is down";
        assert_eq!((error.layer, error.expert, error.cause.to_string()), (LayerIdx(1), ExpertId(4), message.into()));
        assert!(fixture.is_in_memory(1, 4));
    }
    let counts = fixture.traffic().counts;
    assert_eq!((counts.misses, counts.host_hits, fixture.traffic().failed_copies), (1, 4, 5));
}

#[test]
fn a_failed_background_copy_is_no_error() {
    let equip = |d: FakeDevice| d.failing(Direction::ToDevice, 1);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 3), HOST, "lru", |m| m, equip).unwrap();
    for i in 0..30u16 {
        fixture.visit(i % 3, &[i % 4, 5], 1).unwrap();
    }
    assert!(fixture.traffic().failed_copies > 10);
    assert_eq!(fixture.traffic().on_device, 0);
}

#[test]
fn an_expert_wanted_when_its_background_copy_fails_is_computed_from_memory() {
    let equip = |d: FakeDevice| d.failing(Direction::ToDevice, 1);
    let measured = MeasuredCosts { copy: 1.5, host: 1.0, device: 0.1 };
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 3), measured, "lru", |m| m, equip).unwrap();
    // If the copy had succeeded, the device would be chosen the next time.
    fixture.takes[0] = Some(Duration::from_secs(100 * SLOT as u64));
    fixture.visit(0, &[0], 1).unwrap();
    fixture.takes[0] = None;
    assert!(fixture.cache.costs().compute_s(Side::Host, 1, 1) > 1.9);
    fixture.visit(0, &[0], 1).unwrap();
    let TierTraffic { counts, on_host, on_device, failed_copies, .. } = fixture.traffic();
    assert_eq!((counts.misses, counts.in_flight_hits, on_host, on_device, failed_copies), (1, 1, 2, 0, 1));
    assert_eq!(counts.promotions, 2, "the next background copy");
    fixture.cache.new_sequence();
    fixture.visit(0, &[1], 1).unwrap_err();
}

#[test]
fn an_expert_that_could_not_be_copied_out_is_read_again() {
    let equip = |d: FakeDevice| d.failing(Direction::FromDevice, 1);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 1, 1), COPY, "lru", |m| m, equip).unwrap();
    for round in 0..5 {
        for expert in 0..3 {
            fixture.visit(0, &[expert], 1).unwrap();
        }
        assert!(round == 0 || fixture.traffic().failed_copies > 0);
    }
    assert_eq!(fixture.traffic().counts.misses, 15);
}

#[test]
fn a_failed_read_does_not_stop_later_visits() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    for host in [0, 3] {
        let prepare =
            |m: MemoryReader| m.overtaken(2).with_fault(FaultTarget::Shard(broken), ReadFault::Flipped(9), u64::MAX);
        let mut fixture =
            Fixture::with(&shape(CacheScope::Layer, 2, host), COPY, "lru", prepare, |d| d.overtaken(2)).unwrap();
        for round in 0..20u16 {
            let error = fixture.visit(1, &[0, 4, 2], 1).unwrap_err();
            assert_eq!((error.layer, error.expert), (LayerIdx(1), ExpertId(4)));
            assert!(error.to_string().contains("checksum"), "{error}");
            fixture.visit(1, &[round % 4, 5, 3 - round % 2], 1).ok();
            fixture.visit(1, &[0, 1, 2, 3, 5], 1).unwrap();
        }
    }
}
