//! Tests of the ledger, and the same behaviour with plain lists.

mod scratch;

use larder_core::CacheScope;
use larder_policy::eviction::{EvictionSpec, PolicyInputs};
use proptest::prelude::*;

use super::*;

fn lru(rows: usize, experts: usize, slots: usize, scope: CacheScope) -> Ledger {
    let shape = CacheShape { rows, experts, top_k: 2, slots, scope, scratch: 0 };
    with("lru", &shape, &PolicyInputs::default())
}

fn with(policy: &str, shape: &CacheShape, inputs: &PolicyInputs) -> Ledger {
    let spec: EvictionSpec = policy.parse().unwrap();
    Ledger::new(shape, spec.make(shape, inputs).unwrap())
}

/// The choice of one token in a layer, whose logits are unknown.
fn choice(row: usize, wanted: &[usize]) -> LayerChoice<'_> {
    LayerChoice { row: MoeRow(row), wanted, tokens: &[1; 64][..wanted.len()], logits: &[] }
}

fn key(row: usize, expert: usize) -> ExpertKey {
    MoeRow(row).expert(expert)
}

fn open(ledger: &mut Ledger, row: usize, wanted: &[usize]) -> SlotAssignment {
    let mut assignment = SlotAssignment::default();
    ledger.open(MoeRow(row), wanted, &mut assignment);
    assignment
}

/// Reports all reads into slots as succeeded, and closes the visit.
fn finish(ledger: &mut Ledger, row: usize, mut assignment: SlotAssignment) -> SlotAssignment {
    assignment.reads_into_slots().for_each(|(e, _)| ledger.arrived(key(row, e)));
    ledger.close(MoeRow(row), &mut assignment);
    assignment
}

/// A whole visit; every read succeeds.
fn visit(ledger: &mut Ledger, row: usize, wanted: &[usize]) {
    ledger.replay_visit(&choice(row, wanted), &mut SlotAssignment::default());
}

/// Changes the capacity, and checks that each slot is in use or not.
fn set_capacity(ledger: &mut Ledger, slots: usize) -> CapacityChange {
    let before = ledger.capacity();
    let mut change = CapacityChange::default();
    ledger.set_capacity(slots, &mut change);
    let pools = ledger.shape().pools();
    assert_eq!(change.added.len(), pools * slots.saturating_sub(before));
    assert_eq!(change.removed.len(), pools * before.saturating_sub(slots));
    assert_eq!(ledger.unused_slots().count(), pools * (ledger.shape().slots - slots));
    change
}

/// Every policy that needs no inputs.
fn policies() -> impl Iterator<Item = &'static str> {
    larder_policy::eviction::POLICIES.iter().map(|p| p.name).filter(|n| !["belady", "learned"].contains(n))
}

#[test]
fn a_capacity_at_the_start_is_a_cache_of_that_size() {
    for scope in [CacheScope::Layer, CacheScope::Global] {
        for (policy, slots) in policies().flat_map(|policy| [1, 3, 5, 6].map(|slots| (policy, slots))) {
            let shape = |slots| CacheShape { rows: 2, experts: 8, top_k: 2, slots, scope, scratch: 1 };
            let mut small = with(policy, &shape(slots), &PolicyInputs::default());
            let mut large = with(policy, &shape(6), &PolicyInputs::default());
            set_capacity(&mut large, slots);
            assert_eq!(large.policy_shape(), shape(slots));
            for i in 0..200 {
                let wanted = [(3 * i + 1) % 8, (5 * i * i) % 8];
                let wanted = if wanted[0] == wanted[1] { &wanted[..1] } else { &wanted[..] };
                [&mut small, &mut large].into_iter().for_each(|ledger| visit(ledger, i % 2, wanted));
                assert_eq!(small.counts(), large.counts(), "{policy}, {slots} slots, {scope:?}, visit {i}");
            }
        }
    }
}

#[test]
fn every_policy_follows_a_capacity_that_changes() {
    for policy in policies() {
        let shape = CacheShape { rows: 2, experts: 8, top_k: 2, slots: 12, scope: CacheScope::Global, scratch: 1 };
        let mut ledger = with(policy, &shape, &PolicyInputs::default());
        let (mut evicted, mut full) = (0, 0);
        for i in 0..600 {
            if i % 20 == 0 {
                evicted += set_capacity(&mut ledger, [12, 5, 9, 1, 3, 12, 2][i / 20 % 7]).evicted.len();
            }
            visit(&mut ledger, i % 2, &[(3 * i + i / 50) % 8, (5 * i * i + 1) % 7 + 1][..1 + i % 2]);
            let residents = (0..16).filter(|i| ledger.is_resident(key(i / 8, i % 8))).count();
            assert!(residents <= ledger.capacity(), "{policy}: {residents} of {}", ledger.capacity());
            full += usize::from(residents == ledger.capacity());
        }
        assert!(evicted > 20 && full > 100, "{policy}: {evicted} evicted, {full} visits with full pools");
    }
}

#[test]
fn the_best_ranked_of_those_that_came_together_leaves_first() {
    let mut ledger = lru(1, 8, 4, CacheScope::Layer);
    visit(&mut ledger, 0, &[3, 1]);
    visit(&mut ledger, 0, &[5, 6]);
    visit(&mut ledger, 0, &[7]);
    assert!(!ledger.is_resident(key(0, 3)));
    assert!(ledger.is_resident(key(0, 1)));
    assert_eq!(ledger.counts(), CacheCounts { misses: 5, evictions: 1, ..CacheCounts::default() });
}

#[test]
fn a_failed_read_leaves_nothing_behind() {
    let mut ledger = lru(1, 4, 2, CacheScope::Layer);
    let mut assignment = open(&mut ledger, 0, &[0, 1]);
    ledger.arrived(key(0, 0));
    ledger.failed(key(0, 1));
    ledger.close(MoeRow(0), &mut assignment);
    assert!(ledger.is_resident(key(0, 0)) && !ledger.is_resident(key(0, 1)));
    visit(&mut ledger, 0, &[2]);
    assert_eq!(ledger.counts().evictions, 0, "the slot of the failed read is free");
    visit(&mut ledger, 0, &[1]);
    assert_eq!(ledger.counts().rereads, 1);
}

#[test]
fn policies_change_and_no_expert_is_lost() {
    let names: Vec<&str> = policies().collect();
    let shape = CacheShape { rows: 2, experts: 8, top_k: 2, slots: 5, scope: CacheScope::Global, scratch: 0 };
    let make = |name: &str| name.parse::<EvictionSpec>().unwrap().make(&shape, &PolicyInputs::default()).unwrap();
    let steps = |ledger: &mut Ledger, salt: usize| {
        (0..40).for_each(|i| visit(ledger, i % 2, &[(3 * i + salt) % 8, (5 * i * i + 1 + salt) % 7]));
    };
    for (before, after) in names.iter().flat_map(|b| names.iter().map(move |a| (b, a))) {
        let mut ledger = Ledger::new(&shape, make(before));
        steps(&mut ledger, 0);
        let there = |l: &Ledger| (0..16).filter(|i| l.is_resident(key(i / 8, i % 8))).collect::<Vec<_>>();
        let residents = there(&ledger);
        ledger.set_policies(make(after));
        assert_eq!(there(&ledger), residents, "{before} to {after}");
        steps(&mut ledger, 1);
        assert_eq!(there(&ledger).len(), 5, "{before} to {after}");
    }
    // The victims are the same as without the change.
    let (mut same, mut changed) = (Ledger::new(&shape, make("lru")), Ledger::new(&shape, make("lru")));
    for ledger in [&mut same, &mut changed] {
        steps(ledger, 0);
    }
    changed.set_policies(make("lru"));
    for ledger in [&mut same, &mut changed] {
        steps(ledger, 1);
    }
    assert_eq!(changed.counts(), same.counts());
}

#[test]
fn layers_share_slots_only_in_global_scope() {
    for (scope, kept) in [(CacheScope::Layer, true), (CacheScope::Global, false)] {
        let mut ledger = lru(2, 4, 2, scope);
        visit(&mut ledger, 0, &[0, 1]);
        visit(&mut ledger, 1, &[0, 1]);
        assert_eq!(ledger.is_resident(key(0, 0)), kept, "{scope:?}");
    }
}

#[test]
fn a_prefetch_holds_its_slot_until_its_read_ends() {
    let mut ledger = lru(1, 8, 3, CacheScope::Layer);
    visit(&mut ledger, 0, &[0, 1]);
    assert!(ledger.prefetch(key(0, 0)).is_none(), "it is resident");
    let slot = ledger.prefetch(key(0, 5)).unwrap();
    assert!(ledger.prefetch(key(0, 5)).is_none(), "it is being read");
    let assignment = open(&mut ledger, 0, &[1, 2, 3]);
    assert_eq!(assignment.reads_into_slots().count(), 2, "one of the three slots is being read into");
    finish(&mut ledger, 0, assignment);
    let mut assignment = open(&mut ledger, 0, &[5, 3]);
    assert_eq!(assignment.in_flight.as_slice(), &[(5, slot)][..]);
    ledger.arrived(key(0, 5));
    ledger.close(MoeRow(0), &mut assignment);
    let counts = ledger.counts();
    assert_eq!((counts.in_flight_hits, counts.prefetches, counts.useful_prefetches), (1, 1, 1));
    visit(&mut ledger, 0, &[5]);
    assert_eq!(ledger.counts().useful_prefetches, 1, "a prefetch is useful once");
}

#[test]
fn when_prefetches_hold_all_slots_experts_pass_through() {
    let mut ledger = lru(1, 8, 2, CacheScope::Layer);
    let slots = [ledger.prefetch(key(0, 0)).unwrap(), ledger.prefetch(key(0, 1)).unwrap()];
    assert!(ledger.prefetch(key(0, 2)).is_none(), "a prefetch never takes the slot of a read in flight");
    let assignment = open(&mut ledger, 0, &[2]);
    assert_eq!(assignment.misses, [(2, None)]);
    finish(&mut ledger, 0, assignment);
    ledger.failed(key(0, 1));
    let assignment = open(&mut ledger, 0, &[2, 0]);
    assert_eq!(assignment.misses, [(2, Some(slots[1]))]);
    assert_eq!(assignment.in_flight, [(0, slots[0])]);
}

#[test]
fn an_expert_that_the_open_visit_wants_is_not_prefetched() {
    let mut ledger = lru(1, 8, 1, CacheScope::Layer);
    ledger.prefetch(key(0, 5)).unwrap();
    let assignment = open(&mut ledger, 0, &[2, 3]);
    ledger.arrived(key(0, 5));
    assert!(ledger.prefetch(key(0, 2)).is_none(), "it passes through");
    finish(&mut ledger, 0, assignment);
    assert!(ledger.prefetch(key(0, 2)).is_some());
}

#[test]
fn of_more_experts_than_slots_the_last_used_stay_and_the_others_pass_through() {
    let mut ledger = lru(1, 8, 3, CacheScope::Layer);
    visit(&mut ledger, 0, &[0, 1, 2]);
    let assignment = open(&mut ledger, 0, &[2, 4, 0, 5, 6, 1, 7]);
    let stay = |expert| assignment.reads_into_slots().any(|(e, _)| e == expert);
    assert_eq!(assignment.hits.iter().map(|(e, _)| *e).collect::<Vec<_>>(), [2, 0, 1]);
    assert_eq!([4, 5, 6, 7].map(stay), [false, false, true, true]);
    assert_eq!(assignment.evicted, [key(0, 2), key(0, 0)], "1 is wanted after them");
    finish(&mut ledger, 0, assignment);
    assert_eq!(
        [6, 1, 7, 0, 2, 4, 5].map(|e| ledger.is_resident(key(0, e))),
        [true, true, true, false, false, false, false]
    );
}

/// The ledger under LRU as a list of residents per pool, oldest first.
struct Naive {
    scope: CacheScope,
    slots: usize,
    pools: Vec<Vec<(usize, usize)>>,
    counts: CacheCounts,
    seen: std::collections::HashSet<(usize, usize)>,
}

impl Naive {
    fn visit(&mut self, layer: usize, wanted: &[usize]) {
        let pool = &mut self.pools[if self.scope == CacheScope::Layer { layer } else { 0 }];
        let residents = pool.clone();
        for (i, e) in wanted.iter().enumerate() {
            if let Some(at) = pool.iter().position(|r| *r == (layer, *e)) {
                pool.remove(at);
                pool.push((layer, *e));
                self.counts.hits += 1;
                continue;
            }
            self.counts.misses += 1;
            self.counts.rereads += u64::from(!self.seen.insert((layer, *e)));
            pool.push((layer, *e));
            if pool.len() > self.slots {
                let wants = |experts: &[usize], r: &(usize, usize)| r.0 == layer && experts.contains(&r.1);
                let out = pool.iter().position(|r| !wants(wanted, r));
                let out = out.or_else(|| pool.iter().position(|r| wants(&wanted[..=i], r))).unwrap();
                let out = pool.remove(out);
                self.counts.evictions += u64::from(residents.contains(&out));
            }
        }
    }
}

impl Naive {
    fn set_capacity(&mut self, slots: usize) {
        self.slots = slots;
        for pool in &mut self.pools {
            let out = pool.len().saturating_sub(slots);
            pool.drain(..out);
            self.counts.evictions += out as u64;
        }
    }
}

const LAYERS: usize = 3;
const EXPERTS: usize = 8;

fn wanted() -> impl Strategy<Value = (usize, Vec<usize>)> {
    let experts: Vec<usize> = (0..EXPERTS).collect();
    (0..LAYERS, prop::sample::subsequence(experts, 1..=EXPERTS).prop_shuffle())
}

proptest! {
    // 1,000 cases of up to 400 visits of up to 8 experts: about a million operations.
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn behaves_as_lists_do(
        visits in prop::collection::vec((wanted(), prop::option::weighted(0.1, 0.0..1.0)), 200..400),
        slots in 1usize..10,
        global in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let mut ledger = lru(LAYERS, EXPERTS, slots, scope);
        let (counts, seen) = (CacheCounts::default(), Default::default());
        let mut naive = Naive { scope, slots, pools: vec![vec![]; LAYERS], counts, seen };
        for ((layer, wanted), share) in visits {
            if let Some(share) = share {
                let capacity = 1 + (share * slots as f64) as usize;
                set_capacity(&mut ledger, capacity);
                naive.set_capacity(capacity);
            }
            visit(&mut ledger, layer, &wanted);
            naive.visit(layer, &wanted);
            prop_assert_eq!(ledger.counts(), naive.counts);
            for l in 0..LAYERS {
                for e in 0..EXPERTS {
                    let there = naive.pools.iter().any(|p| p.contains(&(l, e)));
                    prop_assert_eq!(ledger.is_resident(key(l, e)), there);
                }
            }
        }
    }
}
