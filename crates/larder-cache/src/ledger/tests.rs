use larder_policy::eviction::find;
use proptest::prelude::*;

use super::*;

fn lru(layers: usize, experts: usize, slots: usize, scope: Scope) -> Ledger {
    Ledger::new(layers, experts, slots, scope, find("lru").unwrap())
}

/// Opens and closes waves until all of `wanted` had their turn; every miss is read well.
fn visit(ledger: &mut Ledger, layer: usize, wanted: &[usize]) {
    let mut rest = wanted;
    while !rest.is_empty() {
        let wave = ledger.open(layer, rest);
        wave.misses.iter().for_each(|(e, _)| ledger.arrived(layer, *e));
        ledger.close(layer, &wave);
        rest = &rest[wave.len()..];
    }
}

#[test]
fn the_best_ranked_of_those_that_came_together_leaves_first() {
    let mut ledger = lru(1, 8, 4, Scope::Layer);
    visit(&mut ledger, 0, &[3, 1]);
    visit(&mut ledger, 0, &[5, 6]);
    visit(&mut ledger, 0, &[7]);
    assert!(!ledger.is_resident(0, 3));
    assert!(ledger.is_resident(0, 1));
    assert_eq!(ledger.counts(), Counts { hits: 0, misses: 5, evictions: 1, rereads: 0 });
}

#[test]
fn a_failed_read_leaves_nothing_behind() {
    let mut ledger = lru(1, 4, 2, Scope::Layer);
    let wave = ledger.open(0, &[0, 1]);
    ledger.arrived(0, 0);
    ledger.failed(0, 1);
    ledger.close(0, &wave);
    assert!(ledger.is_resident(0, 0) && !ledger.is_resident(0, 1));
    visit(&mut ledger, 0, &[2]);
    assert_eq!(ledger.counts().evictions, 0, "the slot of the failed read is free");
    visit(&mut ledger, 0, &[1]);
    assert_eq!(ledger.counts().rereads, 1);
}

#[test]
fn layers_share_slots_only_in_global_scope() {
    for (scope, kept) in [(Scope::Layer, true), (Scope::Global, false)] {
        let mut ledger = lru(2, 4, 2, scope);
        visit(&mut ledger, 0, &[0, 1]);
        visit(&mut ledger, 1, &[0, 1]);
        assert_eq!(ledger.is_resident(0, 0), kept, "{scope:?}");
    }
}

/// The same in the plainest words: a list of residents per pool, oldest first.
struct Naive {
    scope: Scope,
    slots: usize,
    pools: Vec<Vec<(usize, usize)>>,
    counts: Counts,
    seen: std::collections::HashSet<(usize, usize)>,
}

impl Naive {
    fn visit(&mut self, layer: usize, wanted: &[usize]) {
        for wave in wanted.chunks(self.slots) {
            let slots = self.slots;
            let pool = &mut self.pools[if self.scope == Scope::Layer { layer } else { 0 }];
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
        let scope = if global { Scope::Global } else { Scope::Layer };
        let mut ledger = lru(LAYERS, EXPERTS, slots, scope);
        let (counts, seen) = (Counts::default(), Default::default());
        let mut naive = Naive { scope, slots, pools: vec![vec![]; LAYERS], counts, seen };
        for (layer, wanted) in visits {
            visit(&mut ledger, layer, &wanted);
            naive.visit(layer, &wanted);
            prop_assert_eq!(ledger.counts(), naive.counts);
            for l in 0..LAYERS {
                for e in 0..EXPERTS {
                    let there = naive.pools.iter().any(|p| p.contains(&(l, e)));
                    prop_assert_eq!(ledger.is_resident(l, e), there);
                }
            }
        }
    }
}
