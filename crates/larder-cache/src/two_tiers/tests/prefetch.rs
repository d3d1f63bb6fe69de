//! Tests of prefetching while the SSD is idle, and of what each visit reports.

use super::*;
use crate::traffic::Traffic;
use larder_store::reader::{FaultTarget, ReadFault};

#[test]
fn a_hinted_expert_is_there_when_it_is_wanted() {
    for measured in [COPY, HOST] {
        let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 3), measured);
        fixture.hint(1, &[3, 4, 5], 2);
        fixture.visit(0, &[0, 1], 1).unwrap();
        fixture.visit(1, &[3], 1).unwrap();
        let TierTraffic { counts, demand_bytes, prefetch_bytes, .. } = fixture.traffic();
        assert_eq!(
            (counts.prefetches, counts.useful_prefetches, counts.misses),
            (2, 1, 2),
            "the third is beyond the limit"
        );
        assert_eq!((demand_bytes, prefetch_bytes), (2 * SLOT as u64, 2 * SLOT as u64));
        let found = fixture.cache.last_visit();
        assert_eq!(found.hits.len() + found.in_flight.len(), 1, "{found:?}");
        fixture.visit(1, &[3, 4], 1).unwrap();
        assert_eq!(fixture.traffic().counts.useful_prefetches, 2, "each is counted once");
    }
}

#[test]
fn prefetches_wait_for_demand_reads_and_yield_to_newer_hints() {
    let prepare = |m: MemoryReader| m.capacity(1);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 3), COPY, "lru", prepare, |d| d).unwrap();
    fixture.hint(1, &[0, 1, 2], 3);
    fixture.visit(0, &[0, 1, 2], 1).unwrap();
    let begun = fixture.traffic().counts.prefetches;
    assert_eq!(begun, 1, "the queue has room for one after the last demand read");
    fixture.hint(2, &[5], 1);
    fixture.visit(0, &[0], 1).unwrap();
    fixture.visit(1, &[1], 1).unwrap();
    assert_eq!(fixture.traffic().counts.misses, 4, "prefetches that had not begun are discarded");
}

#[test]
fn an_expert_in_either_tier_is_not_prefetched() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 1, 2), COPY);
    (0..2).for_each(|expert| fixture.visit(1, &[expert], 1).unwrap());
    assert!(fixture.is_on_device(1, 1) && !fixture.is_on_device(1, 0));
    fixture.hint(1, &[0, 1, 2], 3);
    fixture.visit(0, &[0], 1).unwrap();
    assert_eq!(fixture.traffic().counts.prefetches, 1);
}

#[test]
fn without_host_slots_prefetches_wait_in_scratch_slots_and_yield_them() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 3, 0), COPY);
    fixture.hint(1, &[0, 1, 2], 3);
    fixture.visit(0, &[0], 1).unwrap();
    // Two scratch slots, of which the wanted expert had one at first.
    assert_eq!(fixture.traffic().counts.prefetches, 1);
    fixture.visit(0, &[0], 1).unwrap();
    assert_eq!(fixture.traffic().counts.prefetches, 1, "an old hint is not read later");
    fixture.hint(1, &[0, 1, 2], 2);
    fixture.visit(0, &[0], 1).unwrap();
    fixture.visit(1, &[0, 1], 1).unwrap();
    let counts = fixture.traffic().counts;
    assert_eq!((counts.prefetches, counts.useful_prefetches, counts.misses), (2, 2, 1));
    assert!(fixture.is_on_device(1, 0) && fixture.is_on_device(1, 1));
    fixture.hint(2, &[0, 1], 2);
    fixture.visit(1, &[0], 1).unwrap();
    fixture.visit(0, &[3, 4, 5], 1).unwrap();
    assert!(!fixture.is_in_memory(2, 0) && !fixture.is_in_memory(2, 1), "demand reads take the slots of prefetches");
}

#[test]
fn a_prefetch_that_could_not_be_read_is_no_error() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    let prepare = |m: MemoryReader| m.with_fault(FaultTarget::Shard(broken), ReadFault::Gone, 1);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 2), COPY, "lru", prepare, |d| d).unwrap();
    fixture.hint(1, &[4], 1);
    fixture.visit(0, &[0], 1).unwrap();
    (1..4).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
    let counts = fixture.traffic().counts;
    assert_eq!((counts.prefetches, counts.useful_prefetches), (1, 0));
    fixture.visit(1, &[4], 1).unwrap();
    assert_eq!(fixture.traffic().counts.rereads, 1);
}

#[test]
fn a_visit_reports_hits_misses_and_evictions() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 1, 1), COPY);
    fixture.visit(0, &[0, 1], 1).unwrap();
    let found = fixture.cache.last_visit();
    assert_eq!((&found.hits[..], &found.misses[..], &found.evicted[..]), (&[][..], &[0, 1][..], &[][..]));
    fixture.visit(0, &[2, 1, 0], 1).unwrap();
    let found = fixture.cache.last_visit();
    assert_eq!((&found.hits[..], &found.misses[..]), (&[1, 0][..], &[2][..]), "in the order wanted");
    assert_eq!(found.evicted.len(), 1, "three experts, two slots: {found:?}");
    let ExpertKey { row, expert: left } = found.evicted[0];
    let left = left.index();
    assert!(row == MoeRow(0) && !fixture.is_on_device(0, left) && !fixture.is_in_memory(0, left));
}

#[test]
fn the_difference_of_two_readings_and_both_tiers_seen_as_one() {
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 1, 2), COPY, "lru", |m| m, |d| d.link(1e-9)).unwrap();
    let round = |fixture: &mut Fixture| {
        for i in 0..12u16 {
            fixture.hint((i + 1) % 3, &[(i + 2) % 6, (i + 1) % 6], 2);
            fixture.visit(i % 3, &[i % 6, (i + 2) % 6], 1).unwrap();
        }
    };
    round(&mut fixture);
    let before = fixture.traffic();
    assert_eq!(before - before, TierTraffic::default());
    round(&mut fixture);
    let passed = fixture.traffic() - before;
    assert_eq!(passed.counts.wanted(), 24);
    // The CPU is tried again now and then.
    assert!(passed.on_device + passed.on_host == 24 && passed.on_host <= 1, "{passed:?}");
    let counts = passed.counts;
    let Traffic { counts: seen, demand_bytes, prefetch_bytes, read_busy, .. } = passed.into();
    assert_eq!((seen.wanted(), seen.hits), (24, counts.device_hits + counts.host_hits));
    assert_eq!((seen.misses, seen.evictions, seen.prefetches), (counts.misses, counts.evictions, counts.prefetches));
    assert_eq!((demand_bytes, prefetch_bytes), (seen.misses * SLOT as u64, seen.prefetches * SLOT as u64));
    assert!(seen.rereads > 0 && seen.prefetches > 0 && seen.evictions > 0 && !read_busy.is_zero(), "{passed:?}");
}

#[test]
fn no_tier_has_more_slots_than_there_are_experts() {
    for (scope, all) in [(CacheScope::Layer, EXPERTS), (CacheScope::Global, LAYERS * EXPERTS)] {
        let shape = shape(scope, usize::MAX, usize::MAX);
        assert_eq!((shape.device.slots, shape.host.slots, shape.policy_shape().slots), (all, all, all));
        let mut fixture = Fixture::new(&shape, COPY);
        (0..9u16).for_each(|i| fixture.visit(i % 3, &[i % 6, (i + 1) % 6], 1).unwrap());
    }
}
