//! Tests of the cache of one tier: every expert once with its own bytes, faults, prefetches.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_core::{Presence, STAGED_ROWS, WantedExpert};
use larder_policy::eviction::{EvictionSpec, PolicyInputs};
use larder_store::reader::{Arena, FaultTarget, MemoryReader, ReadFault};
use proptest::prelude::*;

use super::*;
use crate::testing::{EXPERTS, LAYERS, fill_byte, geometry, layout, numbered_reader, supply};

/// Pass-through slots: fewer than the experts that do not fit.
const PASS_THROUGH: usize = 2;

fn cache(
    slots: usize,
    scope: CacheScope,
    prepare: impl FnOnce(MemoryReader) -> MemoryReader,
) -> (Cache, std::sync::Arc<AtomicU64>) {
    cache_as(&CacheShape::new(&geometry(), slots, scope), prepare)
}

fn cache_as(
    shape: &CacheShape,
    prepare: impl FnOnce(MemoryReader) -> MemoryReader,
) -> (Cache, std::sync::Arc<AtomicU64>) {
    let memory = prepare(numbered_reader());
    let faults = memory.faults_injected();
    let (_arena, pieces) = Arena::new(shape.total_slots() + PASS_THROUGH, layout().bytes).unwrap();
    let lru = "lru".parse::<EvictionSpec>().unwrap().make(shape, &PolicyInputs::default()).unwrap();
    (Cache::new(&geometry(), shape, lru, supply(pieces, memory)), faults)
}

/// Visits experts and checks that each was handed over once with its own bytes.
fn visit(cache: &mut Cache, layer: u16, wanted: &[u16]) -> Result<(), CacheError> {
    visit_rows(cache, layer, wanted, 1).map(drop)
}

/// As [`visit`], with this many rows of each expert. Returns the number of experts that were computed in two stages.
fn visit_rows(cache: &mut Cache, layer: u16, wanted: &[u16], tokens: usize) -> Result<usize, CacheError> {
    let layer = LayerIdx(layer);
    let mut want: Vec<ExpertId> = wanted.iter().map(|e| ExpertId(*e)).collect();
    let wanted: Vec<WantedExpert> = want.iter().map(|e| WantedExpert { expert: *e, tokens }).collect();
    let (mut got, mut begun, mut staged) = (Vec::new(), Vec::new(), 0);
    cache.visit(
        layer,
        &wanted,
        &[],
        &mut |layout, stage, group| {
            for (expert, data) in group {
                assert!(data.iter().all(|b| *b == fill_byte(layer, *expert)), "wrong bytes for {expert} of {layer}");
                if stage == ComputeStage::Inputs {
                    assert!(data.len() >= layout.segments()[0].end && !begun.contains(expert));
                    begun.push(*expert);
                    continue;
                }
                assert_eq!(data.len(), layout.bytes);
                assert_eq!(begun.contains(expert), stage == ComputeStage::Rest);
                begun.retain(|other| other != expert);
                staged += usize::from(stage == ComputeStage::Rest);
                got.push(*expert);
            }
        },
        &|| (),
    )?;
    got.sort();
    want.sort();
    assert_eq!(got, want);
    assert!(begun.is_empty());
    Ok(staged)
}

proptest! {
    #[test]
    fn every_expert_is_handed_over_once_with_its_bytes(
        visits in prop::collection::vec((0..LAYERS as u16, prop::sample::subsequence((0..EXPERTS as u16).collect::<Vec<_>>(), 1..=EXPERTS).prop_shuffle()), 1..60),
        slots in 1usize..8,
        global in any::<bool>(),
        queue in 1usize..4,
        overtaken in 0u64..5,
        prefetches in 0u16..4,
        scratch in 0usize..3,
        ahead in any::<bool>(),
        at_once in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let shape = CacheShape { scratch, ..CacheShape::new(&geometry(), slots, scope) };
        let (mut cache, _) = cache_as(&shape, |m| m.capacity(queue).overtaken(overtaken));
        for (i, (layer, wanted)) in visits.iter().enumerate() {
            // Half of the time the experts that really come next, else others.
            let (next, first) = match visits.get(i + 1) {
                Some((next, experts)) if i % 2 == 0 => (*next, experts[0]),
                _ => (i as u16 % LAYERS as u16, i as u16),
            };
            let expected: Vec<_> = (0..prefetches).map(|g| ExpertId((first + g) % EXPERTS as u16)).collect();
            if ahead { cache.read_ahead(LayerIdx(next), expected) } else { cache.hint(LayerIdx(next), &expected, usize::from(prefetches)) }
            if at_once {
                cache.begin_reads_ahead();
            }
            visit(&mut cache, *layer, wanted).unwrap();
        }
        let Traffic { counts, demand_bytes, prefetch_bytes, reads_ahead, .. } = cache.traffic();
        let wanted: usize = visits.iter().map(|(_, w)| w.len()).sum();
        prop_assert_eq!(counts.wanted(), wanted as u64);
        prop_assert_eq!(demand_bytes, (counts.misses - reads_ahead.used) * layout().bytes as u64);
        prop_assert_eq!(prefetch_bytes, (counts.prefetches + reads_ahead.begun) * layout().bytes as u64);
        prop_assert!(reads_ahead.begun >= reads_ahead.used + reads_ahead.unused);
        prop_assert!(prefetches > 0 || counts.prefetches + counts.in_flight_hits + reads_ahead.begun == 0);
        prop_assert!(cache.filler.is_whole(0));
    }
}

#[test]
fn transient_errors_are_retried() {
    for (fault, one_in) in [(ReadFault::Interrupted, 4), (ReadFault::Disk, 40)] {
        let prepare = |m: MemoryReader| m.overtaken(3).with_fault(FaultTarget::OneIn(one_in), fault, u64::MAX);
        let (mut cache, faults) = cache(2, CacheScope::Layer, prepare);
        for round in 0..300u16 {
            visit(&mut cache, round % 3, &[round % 6, (round + 1) % 6]).unwrap();
        }
        assert!(faults.load(Ordering::Relaxed) > 5, "{fault:?} never happened");
    }
}

#[test]
fn a_permanent_error_names_the_expert_and_leaves_the_cache_usable() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    for fault in [ReadFault::Disk, ReadFault::Gone, ReadFault::Short(100), ReadFault::Flipped(9)] {
        let prepare = |m: MemoryReader| m.overtaken(2).with_fault(FaultTarget::Shard(broken), fault, u64::MAX);
        let (mut cache, faults) = cache(3, CacheScope::Layer, prepare);
        for round in 0..50 {
            let error = visit(&mut cache, 1, &[0, 4, 2]).unwrap_err();
            assert_eq!((error.layer, error.expert), (LayerIdx(1), ExpertId(4)), "{fault:?}");
            visit(&mut cache, 1, &[round % 4, 5, 3 - round % 2]).unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        }
        assert!(faults.load(Ordering::Relaxed) >= 50, "{fault:?}");
        visit(&mut cache, 1, &[0, 1, 2, 3, 5]).unwrap();
    }
}

#[test]
fn the_last_visit_is_reported() {
    let (mut cache, _) = cache(2, CacheScope::Layer, |memory| memory);
    visit(&mut cache, 1, &[0, 1]).unwrap();
    visit(&mut cache, 1, &[1, 3]).unwrap();
    let expected = Visit { hits: vec![1], in_flight: vec![], misses: vec![3], evicted: vec![MoeRow(1).expert(0)] };
    assert_eq!(cache.last_visit(), &expected);
    visit(&mut cache, 1, &[0, 4, 5]).unwrap();
    assert_eq!(cache.last_visit().misses, [0, 4, 5]);
}

#[test]
fn hinted_experts_are_prefetched() {
    let (mut cache, _) = cache(2, CacheScope::Layer, |m| m);
    cache.hint(LayerIdx(1), &[ExpertId(2), ExpertId(5)], 2);
    visit(&mut cache, 0, &[1]).unwrap();
    visit(&mut cache, 1, &[5, 2]).unwrap();
    let counts = cache.traffic().counts;
    assert_eq!(
        (counts.misses, counts.prefetches, counts.useful_prefetches, counts.hits + counts.in_flight_hits),
        (1, 2, 2, 2)
    );
}

#[test]
fn a_prefetch_that_cannot_be_read_is_an_error_only_when_it_is_wanted() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    let (mut cache, faults) =
        cache(2, CacheScope::Layer, |m| m.with_fault(FaultTarget::Shard(broken), ReadFault::Gone, u64::MAX));
    for round in 0..20 {
        cache.hint(LayerIdx(1), &[ExpertId(4)], 1);
        visit(&mut cache, 0, &[round % 3]).unwrap();
        visit(&mut cache, 1, &[round % 4]).unwrap();
        visit(&mut cache, 2, &[round % 5]).unwrap();
    }
    assert!(faults.load(Ordering::Relaxed) > 10);
    assert!(visit(&mut cache, 1, &[4]).is_err());
    visit(&mut cache, 1, &[0, 1, 2]).unwrap();
}

#[test]
fn a_flipped_bit_is_read_again_the_next_time() {
    let (mut cache, _) =
        cache(2, CacheScope::Global, |m| m.with_fault(FaultTarget::Shard(3), ReadFault::Flipped(77), 1));
    assert!(visit(&mut cache, 0, &[3]).unwrap_err().to_string().contains("checksum"));
    visit(&mut cache, 0, &[3]).unwrap();
}

#[test]
fn an_expert_is_read_ahead_once_and_stays_if_it_would_have_stayed() {
    let (mut cache, _) = cache(2, CacheScope::Layer, |m| m);
    for round in 0..20u16 {
        let mut plain = self::cache(2, CacheScope::Layer, |m| m).0;
        let next = [round % 6, (round + 1) % 6, (round + 3) % 6];
        cache.read_ahead(LayerIdx(1), next.map(ExpertId));
        visit(&mut cache, 0, &[round % 5, 5]).unwrap();
        visit(&mut cache, 1, &next).unwrap();
        visit(&mut plain, 1, &next).unwrap();
        let residents = |cache: &Cache| {
            (0..6)
                .filter(|e| cache.residency().presence(MoeRow(1).expert(*e)) == Presence::Resident)
                .collect::<Vec<_>>()
        };
        assert_eq!(residents(&cache), residents(&plain), "the last two stay, whichever was read ahead");
    }
    let Traffic { counts, demand_bytes, prefetch_bytes, reads_ahead, .. } = cache.traffic();
    assert!(reads_ahead.used > 20 && reads_ahead.unused == 0, "{reads_ahead:?}");
    assert_eq!(demand_bytes + prefetch_bytes, counts.misses * layout().bytes as u64);
}

#[test]
fn an_expert_that_cannot_be_read_ahead_is_an_error_only_when_it_is_wanted() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    let prepare = |m: MemoryReader| m.with_fault(FaultTarget::Shard(broken), ReadFault::Gone, u64::MAX);
    let (mut cache, faults) = cache(2, CacheScope::Layer, prepare);
    for round in 0..40u16 {
        cache.read_ahead(LayerIdx(1), [4, round % 4].map(ExpertId));
        visit(&mut cache, 0, &[round % 3, 5, 4]).unwrap();
        match round % 2 {
            0 => visit(&mut cache, 1, &[round % 4, 5, (round + 1) % 4]).unwrap(),
            _ => assert_eq!(visit(&mut cache, 1, &[5, 4, 0, 1]).unwrap_err().expert, ExpertId(4)),
        }
    }
    assert!(faults.load(Ordering::Relaxed) > 20);
    visit(&mut cache, 1, &[0, 1, 2, 3, 5]).unwrap();
    let mut reads = vec![];
    while cache.filler.reads_in_flight() > 0 {
        cache.filler.complete(&mut Duration::default(), &mut reads);
    }
    assert!(cache.filler.is_whole(0), "no slot was lost");
}

#[test]
fn hits_are_computed_before_other_experts_are_read_into_their_slots() {
    for round in 0..40u16 {
        let (mut cache, _) = cache(3, CacheScope::Layer, |m| m.overtaken(2));
        visit(&mut cache, 1, &[0, 1, 2]).unwrap();
        // All three are wanted again, in an order in which some of them give their slots up.
        visit(&mut cache, 1, &[round % 3, 3, (round + 1) % 3, 4, (round + 2) % 3, 5]).unwrap();
        assert_eq!(cache.traffic().counts.hits, 3);
    }
}

#[test]
fn other_work_is_done_once_between_the_hits_and_the_first_wait() {
    let (mut cache, _) = cache(4, CacheScope::Layer, |reader| reader);
    let events = RefCell::new(String::new());
    let mut events_of = |wanted: &[u16]| {
        let wanted: Vec<_> = wanted.iter().map(|e| WantedExpert { expert: ExpertId(*e), tokens: 1 }).collect();
        let mut compute = |_: &ExpertLayout, stage: ComputeStage, group: &[(ExpertId, &[u8])]| {
            if stage != ComputeStage::Inputs {
                group.iter().for_each(|(expert, _)| *events.borrow_mut() += &expert.0.to_string());
            }
        };
        cache.visit(LayerIdx(0), &wanted, &[], &mut compute, &|| *events.borrow_mut() += "w").unwrap();
        events.take()
    };
    let mut overlapped = 0;
    for _ in 0..20 {
        for (others, misses) in [([0, 1], [2, 3]), ([2, 3], [4, 5]), ([4, 5], [0, 1])] {
            events_of(&others);
            assert!(!events_of(&others).contains('w'), "nothing is read");
            let events = events_of(&[misses[0], others[0], misses[1], others[1]]);
            assert_eq!(events.replace('w', "").len(), 4);
            overlapped += u32::from(events.contains('w'));
            assert!(events.matches('w').count() <= 1 && events.find('w').is_none_or(|at| at >= 2), "{events}");
        }
    }
    assert!(overlapped > 5, "{overlapped} of 60 visits");
}

#[test]
fn gate_and_up_of_few_rows_are_computed_while_the_rest_is_read() {
    let staged_of = |experts: &[u16], tokens| {
        let (mut cache, _) = cache(2, CacheScope::Layer, |memory| memory.overtaken(3));
        (0..100).map(|round| visit_rows(&mut cache, round % 3, experts, tokens).unwrap()).sum::<usize>()
    };
    let few = staged_of(&[0, 1, 2, 3], STAGED_ROWS / 4);
    assert!(few > 20, "{few} experts were computed in two stages");
    assert_eq!(staged_of(&[0, 1, 2, 3], STAGED_ROWS / 4 + 1), 0);
}

proptest! {
    #[test]
    fn every_expert_has_its_bytes_whatever_the_capacity(
        visits in prop::collection::vec((0..LAYERS as u16, prop::sample::subsequence((0..EXPERTS as u16).collect::<Vec<_>>(), 1..=EXPERTS).prop_shuffle()), 1..60),
        capacities in prop::collection::vec(0.0..1.0, 1..60),
        slots in 1usize..8,
        global in any::<bool>(),
        overtaken in 0u64..5,
        prefetches in 0u16..4,
        scratch in 0usize..3,
        ahead in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let shape = CacheShape { scratch, ..CacheShape::new(&geometry(), slots, scope) };
        let (mut cache, _) = cache_as(&shape, |m| m.overtaken(overtaken));
        for (i, (layer, wanted)) in visits.iter().enumerate() {
            if let Some(share) = capacities.get(i) {
                cache.set_capacity(1 + (share * slots as f64) as usize);
                prop_assert!(cache.filler.is_whole(0));
            }
            let expected: Vec<_> = (0..prefetches).map(|g| ExpertId((i as u16 + g) % EXPERTS as u16)).collect();
            let next = LayerIdx((i as u16 + 1) % LAYERS as u16);
            if ahead { cache.read_ahead(next, expected) } else { cache.hint(next, &expected, usize::from(prefetches)) }
            visit(&mut cache, *layer, wanted).unwrap();
            let all: usize = (0..LAYERS).map(|row| residents(&cache, row).len()).sum();
            prop_assert!(all <= cache.capacity() * shape.pools());
        }
        prop_assert!(cache.filler.is_whole(0));
    }
}

#[test]
fn experts_that_a_smaller_capacity_evicts_are_in_the_next_visit() {
    let (mut cache, _) = cache(3, CacheScope::Layer, |m| m);
    visit(&mut cache, 0, &[0, 1, 2]).unwrap();
    visit(&mut cache, 1, &[3, 4]).unwrap();
    cache.set_capacity(1);
    visit(&mut cache, 2, &[5]).unwrap();
    assert_eq!(cache.last_visit().evicted, [(0, 0), (0, 1), (1, 3)].map(|(row, expert)| MoeRow(row).expert(expert)));
    visit(&mut cache, 2, &[5]).unwrap();
    assert!(cache.last_visit().evicted.is_empty());
    assert_eq!([0, 1].map(|row| residents(&cache, row)), [vec![2], vec![4]]);
}

#[test]
fn memory_that_cannot_be_given_back_is_counted_until_it_can() {
    let bytes = |slots: u64| slots * layout().bytes.next_multiple_of(4096) as u64;
    let (mut cache, _) = cache(4, CacheScope::Layer, |m| m.refusing_releases(5));
    for row in 0..LAYERS as u16 {
        visit(&mut cache, row, &[0, 1, 2, 3]).unwrap();
    }
    cache.set_capacity(2);
    assert_eq!(cache.kept_bytes(), bytes(5), "6 slots are not in use, one of them is given back");
    let before = cache.ledger.counts();
    cache.set_capacity(2);
    assert_eq!((cache.kept_bytes(), cache.ledger.counts()), (0, before), "the next try succeeds");

    let (mut cache, _) = self::cache(4, CacheScope::Layer, |m| m.refusing_releases(usize::MAX));
    cache.set_capacity(1);
    assert_eq!(cache.kept_bytes(), bytes(9));
    cache.set_capacity(3);
    assert_eq!(cache.kept_bytes(), bytes(3), "slots in use are not kept");
    visit(&mut cache, 0, &[0, 1, 2, 3]).unwrap();
    cache.set_capacity(4);
    assert_eq!(cache.kept_bytes(), 0);
}

fn residents(cache: &Cache, row: usize) -> Vec<usize> {
    let presence = |expert: usize| cache.residency().presence(MoeRow(row).expert(expert));
    (0..EXPERTS).filter(|expert| presence(*expert) == Presence::Resident).collect()
}

#[test]
fn hot_experts_fill_free_slots_and_evict_nothing() {
    let (mut cache, _) = cache(2, CacheScope::Layer, |m| m.overtaken(2));
    cache.set_hot([(0, 5), (1, 3), (0, 4), (1, 3), (0, 1), (2, 0)].map(|(row, expert)| MoeRow(row).expert(expert)));
    while cache.read_hot() {}
    assert_eq!([0, 1, 2].map(|row| residents(&cache, row)), [vec![4, 5], vec![3], vec![0]]);
    visit(&mut cache, 0, &[5, 4]).unwrap();
    visit(&mut cache, 1, &[3, 2]).unwrap();
    let Traffic { counts, prefetch_bytes, .. } = cache.traffic();
    assert_eq!((counts.hits, counts.misses, counts.evictions, counts.useful_prefetches), (3, 1, 0, 3));
    assert_eq!(prefetch_bytes, 4 * layout().bytes as u64);
    assert!(!cache.read_hot() && cache.filler.is_whole(0));
}

#[test]
fn the_hottest_expert_is_evicted_last() {
    let (mut cache, _) = cache(3, CacheScope::Layer, |m| m);
    cache.set_hot([4, 2, 0].map(|expert| MoeRow(1).expert(expert)));
    while cache.read_hot() {}
    for (wanted, left) in [(1, vec![1, 2, 4]), (3, vec![1, 3, 4]), (5, vec![1, 3, 5])] {
        visit(&mut cache, 1, &[wanted]).unwrap();
        assert_eq!(residents(&cache, 1), left);
    }
}

#[test]
fn no_hot_read_begins_after_a_visit() {
    let (mut cache, _) = cache(EXPERTS, CacheScope::Layer, |m| m);
    cache.set_hot((0..LAYERS * EXPERTS).map(|index| ExpertKey::from_index(index, EXPERTS)));
    assert!(cache.read_hot());
    let begun = cache.traffic().counts.prefetches;
    assert!((1..=4).contains(&begun), "{begun} reads would be before a prompt's");
    visit(&mut cache, 2, &[0, 1]).unwrap();
    while cache.read_hot() {}
    assert_eq!(cache.traffic().counts.prefetches, begun);
    assert!(cache.filler.is_whole(0));
}

#[test]
fn a_hot_expert_that_cannot_be_read_is_an_error_only_when_it_is_wanted() {
    let broken = EXPERTS + 4; // layer 1, expert 4
    let (mut cache, _) =
        cache(2, CacheScope::Layer, |m| m.with_fault(FaultTarget::Shard(broken), ReadFault::Flipped(3), u64::MAX));
    cache.set_hot([4, 4, 0, 1].map(|expert| MoeRow(1).expert(expert)));
    while cache.read_hot() {}
    assert_eq!(cache.free_slots(LayerIdx(1)) + residents(&cache, 1).len(), 2);
    visit(&mut cache, 1, &[0, 1, 5]).unwrap();
    assert_eq!(visit(&mut cache, 1, &[4]).unwrap_err().expert, ExpertId(4));
}

proptest! {
    #[test]
    fn every_expert_has_its_bytes_whatever_was_hot(
        hot in prop::collection::vec(0..LAYERS * EXPERTS, 0..40),
        steps in 0usize..30,
        visits in prop::collection::vec((0..LAYERS as u16, prop::sample::subsequence((0..EXPERTS as u16).collect::<Vec<_>>(), 1..=EXPERTS).prop_shuffle()), 1..20),
        slots in 1usize..8,
        global in any::<bool>(),
        scratch in 0usize..3,
        overtaken in 0u64..5,
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let shape = CacheShape { scratch, ..CacheShape::new(&geometry(), slots, scope) };
        let (mut cache, _) = cache_as(&shape, |m| m.overtaken(overtaken));
        cache.set_hot(hot.into_iter().map(|index| ExpertKey::from_index(index, EXPERTS)));
        for _ in 0..steps {
            cache.read_hot();
        }
        for (layer, wanted) in &visits {
            visit(&mut cache, *layer, wanted).unwrap();
            cache.read_hot();
        }
        while cache.read_hot() {}
        prop_assert!(cache.filler.is_whole(0));
        prop_assert_eq!(cache.traffic().prefetch_bytes, cache.traffic().counts.prefetches * layout().bytes as u64);
    }
}
