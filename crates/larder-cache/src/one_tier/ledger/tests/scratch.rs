//! Tests of scratch slots: an expert that passes through displaces no other.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_policy::eviction::{FutureUses, POLICIES};

use super::*;

fn shape(slots: usize, scope: CacheScope, scratch: usize) -> CacheShape {
    CacheShape { rows: LAYERS, experts: EXPERTS, top_k: 2, slots, scope, scratch }
}

fn inputs(visits: &[(usize, Vec<usize>)]) -> PolicyInputs {
    let future = FutureUses::new(LAYERS, EXPERTS, visits.iter().map(|(row, wanted)| (MoeRow(*row), wanted)));
    PolicyInputs { future: Some(Arc::new(future)), ..PolicyInputs::default() }
}

fn misses(policy: &str, shape: &CacheShape, visits: &[(usize, Vec<usize>)]) -> u64 {
    let mut ledger = with(policy, shape, &inputs(visits));
    visits.iter().for_each(|(row, wanted)| visit(&mut ledger, *row, wanted));
    ledger.counts().misses
}

#[test]
fn an_expert_that_came_in_may_leave_when_the_visit_closes() {
    let visits: Vec<_> = [0, 1, 2, 0, 1].map(|e| (0, vec![e])).into();
    let mut ledger = with("belady", &shape(2, CacheScope::Layer, 1), &inputs(&visits));
    for (row, wanted) in &visits {
        ledger.begin(&choice(*row, wanted));
        let assignment = open(&mut ledger, *row, wanted);
        assert!(assignment.evicted.is_empty(), "there is a scratch slot");
        let assignment = finish(&mut ledger, *row, assignment);
        assert_eq!(assignment.evicted, if wanted == &[2] { vec![key(0, 2)] } else { vec![] });
    }
    assert_eq!(ledger.counts(), CacheCounts { hits: 2, misses: 3, evictions: 1, ..CacheCounts::default() });
}

#[test]
fn more_fit_together_with_scratch_slots_but_no_more_stay() {
    let mut ledger = with("lru", &shape(2, CacheScope::Layer, 3), &PolicyInputs::default());
    let assignment = open(&mut ledger, 1, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(assignment.reads_into_slots().count(), 5);
    let assignment = finish(&mut ledger, 1, assignment);
    assert_eq!(assignment.evicted, [1, 2, 3].map(|e| key(1, e)));
}

/// The least number of misses from `residents` on, a set of keys as bits, by trying every set that could stay.
fn least(shape: &CacheShape, visits: &[(usize, Vec<usize>)], residents: u32) -> u64 {
    let Some(((row, wanted), rest)) = visits.split_first() else { return 0 };
    let wanted: u32 = wanted.iter().map(|e| 1 << shape.key(key(*row, *e)).0).sum();
    let there = residents | wanted;
    let missed = u64::from((wanted & !residents).count_ones());
    let most = there.count_ones().min(shape.slots as u32);
    let subsets = std::iter::successors(Some(there), |s| (*s > 0).then(|| (s - 1) & there));
    let kept = subsets.filter(|s| s.count_ones() == most);
    missed + kept.map(|s| least(shape, rest, s)).min().unwrap_or(0)
}

/// A row and up to `most` of its experts.
fn visits(most: usize) -> impl Strategy<Value = (usize, Vec<usize>)> {
    let experts: Vec<usize> = (0..EXPERTS).collect();
    (0..LAYERS, prop::sample::subsequence(experts, 1..=most).prop_shuffle())
}

proptest! {
    #[test]
    fn belady_is_optimal_where_no_expert_has_to_stay(visits in prop::collection::vec(visits(2), 1..7), slots in 1usize..4) {
        let shape = shape(slots, CacheScope::Global, 2);
        prop_assert_eq!(misses("belady", &shape, &visits), least(&shape, &visits, 0));
    }

    #[test]
    fn no_policy_beats_belady_with_scratch_slots(
        visits in prop::collection::vec(visits(3), 1..120),
        slots in 3usize..9,
        scratch in 0usize..4,
        global in any::<bool>(),
    ) {
        let shape = shape(slots, if global { CacheScope::Global } else { CacheScope::Layer }, scratch);
        let optimum = misses("belady", &shape, &visits);
        for policy in POLICIES.iter().filter(|p| p.name != "learned") {
            prop_assert!(misses(policy.name, &shape, &visits) >= optimum, "{}", policy.name);
        }
    }

    /// Visits, prefetches and failures under every policy: no slot is lost or assigned twice, and no pool exceeds its
    /// slots.
    #[test]
    fn slots_are_conserved(
        visits in prop::collection::vec((visits(EXPERTS), 0usize..4, any::<bool>()), 1..60),
        slots in 1usize..7,
        scratch in 0usize..4,
        global in any::<bool>(),
        which in 0..POLICIES.len(),
    ) {
        let shape = shape(slots, if global { CacheScope::Global } else { CacheScope::Layer }, scratch);
        let known: Vec<_> = visits.iter().map(|(visit, ..)| visit.clone()).collect();
        let name = if POLICIES[which].name == "learned" { "lru" } else { POLICIES[which].name };
        let mut ledger = with(name, &shape, &inputs(&known));
        let (mut read, mut prefetches) = (0, 0);
        for ((row, wanted), failing, prefetch) in &visits {
            let prefetch = (*prefetch).then(|| ((row + 1) % LAYERS, wanted[0]));
            let prefetch = prefetch.filter(|(row, e)| ledger.prefetch(key(*row, *e)).is_some());
            prefetches += usize::from(prefetch.is_some());
            ledger.begin(&choice(*row, wanted));
            let mut assignment = open(&mut ledger, *row, wanted);
            read += assignment.misses.len();
            for (expert, _) in assignment.reads_into_slots().chain(assignment.in_flight.iter().copied()) {
                if expert % 4 == *failing { ledger.failed(key(*row, expert)) } else { ledger.arrived(key(*row, expert)) }
            }
            check(&ledger, &shape, shape.total_slots());
            ledger.close(MoeRow(*row), &mut assignment);
            prop_assert!(assignment.evicted.iter().all(|e| ledger.is_absent(*e)));
            if let Some((row, expert)) = prefetch.filter(|(row, e)| ledger.in_flight(key(*row, *e)).is_some()) {
                ledger.arrived(key(row, expert));
            }
            check(&ledger, &shape, shape.slots);
        }
        prop_assert_eq!(ledger.counts().misses, read as u64);
        prop_assert_eq!(ledger.counts().prefetches, prefetches as u64);
    }
}

/// Checks that every resident has a slot of its own, and that no pool has more than `most`.
fn check(ledger: &Ledger, shape: &CacheShape, most: usize) {
    let mut taken = BTreeSet::new();
    let mut held = vec![0; shape.pools()];
    for row in 0..LAYERS {
        for expert in 0..EXPERTS {
            if let State::Resident(slot) | State::Reading(slot) | State::Prefetching(slot) =
                ledger.entries[ledger.index(key(row, expert))].state
            {
                assert!(taken.insert(slot) && (slot as usize) < shape.total_slots());
                held[shape.pool(MoeRow(row))] += 1;
            }
        }
    }
    assert!(held.iter().all(|held| *held <= most), "{held:?}");
    let free = ledger.pools.iter().map(|p| p.free.len()).sum::<usize>() + ledger.scratch.len();
    assert_eq!(taken.len() + free, shape.total_slots(), "a slot was lost");
}
