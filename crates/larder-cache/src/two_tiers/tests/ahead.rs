//! Tests of copies that are begun before anybody wants the expert: of predicted experts, and of all that a device has
//! room for.

use std::sync::Arc;

use larder_store::reader::{FaultTarget, ReadFault};

use super::*;

/// Completes the copies in flight.
fn finish_copies(fixture: &mut Fixture) {
    while !fixture.cache.links.link_idles() {
        fixture.cache.links.complete_one();
    }
}

/// A cache in which expert 0 of layer 1 is in memory, and 1 and 2 on the device, which has room for two.
fn with_one_in_memory() -> Fixture {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 4), COPY);
    (0..3).for_each(|expert| fixture.visit(1, &[expert], 1).unwrap());
    finish_copies(&mut fixture);
    assert!(!fixture.is_on_device(1, 0) && fixture.is_in_memory(1, 0));
    assert!(fixture.is_on_device(1, 1) && fixture.is_on_device(1, 2));
    fixture
}

#[test]
fn a_predicted_expert_is_copied_behind_the_layer_before() {
    let mut fixture = with_one_in_memory();
    fixture.hint(1, &[0, 1], 2);
    fixture.visit(0, &[3], 1).unwrap();
    finish_copies(&mut fixture);
    assert!(fixture.is_on_device(1, 0) && fixture.is_on_device(1, 1), "the place of one that is not predicted");
    let counts = fixture.traffic().counts;
    assert_eq!((counts.copies_ahead, counts.useful_copies_ahead, counts.free_demotions), (1, 0, 2));
    fixture.visit(1, &[0], 1).unwrap();
    fixture.visit(1, &[0], 1).unwrap();
    let counts = fixture.traffic().counts;
    assert_eq!((counts.useful_copies_ahead, counts.device_hits, counts.host_hits), (1, 2, 0), "counted once");
}

#[test]
fn a_prediction_costs_no_expert_its_place_that_is_predicted_or_not_in_memory() {
    let mut fixture = with_one_in_memory();
    fixture.hint(1, &[0, 1, 2], 3);
    fixture.visit(0, &[3], 1).unwrap();
    finish_copies(&mut fixture);
    assert!(!fixture.is_on_device(1, 0), "all are predicted");
    // Without slots in memory, what leaves the device has to be read again.
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 0), COPY);
    (1..3).for_each(|expert| fixture.visit(1, &[expert], 1).unwrap());
    fixture.hint(1, &[0], 1);
    fixture.visit(0, &[3], 1).unwrap();
    fixture.visit(0, &[3], 1).unwrap();
    fixture.hint(1, &[0], 1);
    fixture.visit(0, &[3], 1).unwrap();
    finish_copies(&mut fixture);
    assert!(fixture.is_on_device(1, 1) && fixture.is_on_device(1, 2));
    assert_eq!(fixture.traffic().counts.copies_ahead, 0);
}

#[test]
fn a_copy_ahead_that_fails_is_no_error_and_not_useful() {
    let mut fixture =
        Fixture::with(&shape(CacheScope::Layer, 2, 4), HOST, "lru", |m| m, |d| d.failing(Direction::ToDevice, 1))
            .unwrap();
    for hint in [false, true] {
        fixture.visit(1, &[0], 1).unwrap();
        finish_copies(&mut fixture);
        if hint {
            fixture.hint(1, &[0], 1);
        }
        fixture.visit(0, &[3], 1).unwrap();
        finish_copies(&mut fixture);
    }
    fixture.visit(1, &[0], 1).unwrap();
    let counts = fixture.traffic().counts;
    assert_eq!((counts.copies_ahead, counts.useful_copies_ahead, counts.device_hits), (1, 0, 0), "{counts:?}");
}

#[test]
fn a_device_with_room_for_all_experts_is_filled() {
    for (scope, device, host) in [(CacheScope::Layer, EXPERTS, 0), (CacheScope::Global, LAYERS * EXPERTS, 3)] {
        let mut fixture = Fixture::with(&shape(scope, device, host), COPY, "lru", |m| m, |d| d.polled(2)).unwrap();
        assert!(fixture.cache.slots_of_layer(LayerIdx(0)).is_none());
        let mut visits = 0;
        while (0..LAYERS).any(|layer| fixture.cache.slots_of_layer(LayerIdx(layer as u16)).is_none()) {
            fixture.visit(0, &[0], 1).unwrap();
            visits += 1;
            assert!(visits < 2000, "{scope:?}");
        }
        // Slots that experts passed through are free again, whichever layer wanted these.
        for layer in 0..LAYERS as u16 {
            let slots = fixture.cache.slots_of_layer(LayerIdx(layer)).unwrap();
            let wanted = [0, 1, 2, 3, 4, 5].map(|id| WantedExpert { expert: ExpertId(id), tokens: 1 });
            fixture.cache.computed_on_device(LayerIdx(layer), &wanted, &slots);
            fixture.check();
        }
        let TierTraffic { counts, prefetch_bytes, to_device_bytes, .. } = fixture.traffic();
        let all = (LAYERS * EXPERTS) as u64;
        assert_eq!((counts.misses, counts.prefetches, counts.evictions), (1, all - 1, 0), "{scope:?}");
        assert_eq!((prefetch_bytes / SLOT as u64, to_device_bytes / SLOT as u64), (all - 1, all));
    }
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, EXPERTS - 1, 0), COPY);
    (0..50).for_each(|_| fixture.visit(0, &[0], 1).unwrap());
    assert_eq!(fixture.traffic().counts.prefetches, 0, "without room for all, experts come when they are wanted");
}

#[test]
fn an_expert_that_cannot_be_read_is_left_until_it_is_wanted() {
    let broken = 4;
    let prepare = |m: MemoryReader| m.with_fault(FaultTarget::Shard(broken), ReadFault::Gone, 1);
    let shape = shape(CacheScope::Layer, EXPERTS, 0);
    let mut fixture = Fixture::with(&shape, COPY, "lru", prepare, |d| d.polled(2)).unwrap();
    (0..400).for_each(|_| fixture.visit(0, &[0], 1).unwrap());
    let all = (LAYERS * EXPERTS) as u64;
    assert_eq!(fixture.traffic().counts.prefetches, all - 1, "once, and all others");
    assert!(fixture.cache.slots_of_layer(LayerIdx(0)).is_none() && fixture.cache.slots_of_layer(LayerIdx(2)).is_some());
    // The fault was for one read.
    fixture.visit(0, &[broken as u16], 1).unwrap();
    assert!(fixture.cache.slots_of_layer(LayerIdx(0)).is_some());
}

#[test]
fn slots_of_a_layer_are_known_while_all_of_its_experts_are_on_the_device() {
    let mut fixture = Fixture::new(&shape(CacheScope::Global, LAYERS * EXPERTS - 1, 0), COPY);
    let of_layer = |fixture: &mut Fixture, layer| fixture.cache.slots_of_layer(LayerIdx(layer));
    (0..EXPERTS as u16).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
    let slots = of_layer(&mut fixture, 0).expect("all were wanted");
    assert!(
        (0..EXPERTS).all(|e| fixture.cache.links.tiers.locate(MoeRow(0).expert(e)) == ExpertLocation::Device(slots[e]))
    );
    assert!(Arc::ptr_eq(&slots, &of_layer(&mut fixture, 0).unwrap()), "as long as nothing changes");
    let wanted = [2, 0].map(|id| WantedExpert { expert: ExpertId(id), tokens: 1 });
    fixture.cache.computed_on_device(LayerIdx(0), &wanted, &slots);
    let TierTraffic { counts, on_device, .. } = fixture.traffic();
    assert_eq!((counts.device_hits, counts.wanted(), on_device), (2, EXPERTS as u64 + 2, EXPERTS as u64 + 2));
    assert_eq!(fixture.cache.last_visit().hits, [2, 0]);
    // The others take one place more than there is: the one that was not wanted for the longest time leaves.
    for layer in 1..LAYERS as u16 {
        (0..EXPERTS as u16).for_each(|expert| fixture.visit(layer, &[expert], 1).unwrap());
    }
    assert!(of_layer(&mut fixture, 0).is_none() && !fixture.is_on_device(0, 1), "expert 1 has left");
}
