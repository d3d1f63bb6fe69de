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

fn open(ledger: &mut Ledger, row: usize, wanted: &[usize]) -> Wave {
    let mut wave = Wave::default();
    ledger.open(MoeRow(row), wanted, &mut wave);
    wave
}

/// Opens and closes waves until all of `wanted` are computed; every read succeeds.
fn visit(ledger: &mut Ledger, layer: usize, wanted: &[usize]) {
    ledger.begin(&choice(layer, wanted));
    let mut rest = wanted;
    while !rest.is_empty() {
        let mut wave = open(ledger, layer, rest);
        wave.misses.iter().for_each(|(e, _)| ledger.arrived(key(layer, *e)));
        ledger.close(MoeRow(layer), &mut wave);
        rest = &rest[wave.len()..];
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
    let mut wave = open(&mut ledger, 0, &[0, 1]);
    ledger.arrived(key(0, 0));
    ledger.failed(key(0, 1));
    ledger.close(MoeRow(0), &mut wave);
    assert!(ledger.is_resident(key(0, 0)) && !ledger.is_resident(key(0, 1)));
    visit(&mut ledger, 0, &[2]);
    assert_eq!(ledger.counts().evictions, 0, "the slot of the failed read is free");
    visit(&mut ledger, 0, &[1]);
    assert_eq!(ledger.counts().rereads, 1);
}

#[test]
fn policies_change_and_no_expert_is_lost() {
    let names = larder_policy::eviction::POLICIES.iter().map(|p| p.name).filter(|n| !["belady", "learned"].contains(n));
    let names: Vec<&str> = names.collect();
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
    let mut wave = open(&mut ledger, 0, &[1, 2, 3]);
    assert_eq!(wave.len(), 2, "one slot of three is being read into");
    wave.misses.iter().for_each(|(e, _)| ledger.arrived(key(0, *e)));
    ledger.close(MoeRow(0), &mut wave);
    let mut wave = open(&mut ledger, 0, &[5, 3]);
    assert_eq!((wave.in_flight.as_slice(), wave.misses.len()), (&[(5, slot)][..], 1));
    ledger.arrived(key(0, 3));
    ledger.arrived(key(0, 5));
    ledger.close(MoeRow(0), &mut wave);
    let counts = ledger.counts();
    assert_eq!((counts.in_flight_hits, counts.prefetches, counts.useful_prefetches), (1, 1, 1));
    visit(&mut ledger, 0, &[5]);
    assert_eq!(ledger.counts().useful_prefetches, 1, "a prefetch is useful once");
}

#[test]
fn when_prefetches_hold_all_slots_no_expert_fits() {
    let mut ledger = lru(1, 8, 2, CacheScope::Layer);
    let slots = [ledger.prefetch(key(0, 0)).unwrap(), ledger.prefetch(key(0, 1)).unwrap()];
    assert!(ledger.prefetch(key(0, 2)).is_none(), "a prefetch never takes the slot of a read in flight");
    assert!(open(&mut ledger, 0, &[2]).is_empty());
    ledger.failed(key(0, 1));
    let wave = open(&mut ledger, 0, &[2, 0]);
    assert_eq!(wave.misses, [(2, slots[1])]);
    assert_eq!(wave.in_flight, [(0, slots[0])]);
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
        for wave in wanted.chunks(self.slots) {
            let slots = self.slots;
            let pool = &mut self.pools[if self.scope == CacheScope::Layer { layer } else { 0 }];
            for e in wave {
                if let Some(at) = pool.iter().position(|r| *r == (layer, *e)) {
                    pool.remove(at);
                    self.counts.hits += 1;
                } else {
                    self.counts.misses += 1;
                    self.counts.rereads += u64::from(!self.seen.insert((layer, *e)));
                    if pool.len() == slots {
                        let pinned = |r: &(usize, usize)| r.0 == layer && wave.contains(&r.1);
                        let out = pool.iter().position(|r| !pinned(r)).unwrap();
                        pool.remove(out);
                        self.counts.evictions += 1;
                    }
                }
                pool.push((layer, *e));
            }
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
        visits in prop::collection::vec(wanted(), 200..400),
        slots in 1usize..10,
        global in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let mut ledger = lru(LAYERS, EXPERTS, slots, scope);
        let (counts, seen) = (CacheCounts::default(), Default::default());
        let mut naive = Naive { scope, slots, pools: vec![vec![]; LAYERS], counts, seen };
        for (layer, wanted) in visits {
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
