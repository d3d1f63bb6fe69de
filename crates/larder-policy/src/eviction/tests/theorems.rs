//! The sequences of the proofs of "Cache Management for Mixture-of-Experts LLMs", theorems 1 and 3.

use larder_core::CacheScope;

use super::rig::Rig;
use super::*;

const LAYERS: usize = 4;

/// Misses of `rounds` rounds in which each layer asks for one expert, given by `page`.
fn misses(name: &str, shape: &CacheShape, rounds: usize, page: impl Fn(usize, usize) -> usize) -> usize {
    let requests = (0..rounds).flat_map(|round| (0..LAYERS).map(move |row| (round, row)));
    let requests: Vec<_> = requests.map(|(round, row)| (MoeRow(row), [page(round, row)])).collect();
    let future = Arc::new(FutureUses::new(LAYERS, shape.experts, requests.iter().copied()));
    let mut rig = Rig::new(name, shape, future);
    requests.iter().for_each(|(row, wanted)| rig.serve(*row, wanted));
    rig.misses
}

/// One layer cycles through its experts, the others stay with one.
#[test]
fn theorem_1_a_cache_split_by_layer_never_stops_missing() {
    let experts = 6;
    let page = |round: usize, row: usize| if row == 2 { round % experts } else { 0 };
    // Slots for every expert that is ever wanted: one of each quiet layer and all of the busy one.
    let all = experts + LAYERS - 1;
    let global = CacheShape { rows: LAYERS, experts, top_k: 1, slots: 12, scope: CacheScope::Global, scratch: 0 };
    let split = CacheShape { slots: global.slots / LAYERS, scope: CacheScope::Layer, ..global };
    let rounds = 600;
    for name in ["lru", "llru", "marking", "belady"] {
        assert_eq!(misses(name, &global, rounds, page), all, "{name}: only first uses miss");
        assert!(misses(name, &split, rounds, page) >= rounds / experts, "{name}");
        assert!(misses(name, &split, 2 * rounds, page) >= misses(name, &split, rounds, page) + rounds / experts);
    }
    assert_eq!(misses("lru", &split, rounds, page), rounds + LAYERS - 1, "the busy layer always misses");
}

/// All layers cycle through their experts, and one slot is missing.
#[test]
fn theorem_3_lru_misses_always_and_the_optimum_once_in_as_many_requests_as_there_are_slots() {
    let experts = 5;
    let slots = experts * LAYERS - 1;
    let shape = CacheShape { rows: LAYERS, experts, top_k: 1, slots, scope: CacheScope::Global, scratch: 0 };
    let rounds = 40 * slots;
    let requests = rounds * LAYERS;
    let misses = |name| misses(name, &shape, rounds, |round, _| round % experts);
    assert_eq!(misses("lru"), requests);
    let optimum = misses("belady");
    let first = slots + 1;
    assert!((requests - first) / slots <= optimum && optimum <= (requests - first) / slots + first, "{optimum}");
    // Marking is H_k-competitive: far from the worst.
    let harmonic: f64 = (1..=slots).map(|i| 1.0 / i as f64).sum();
    let marking = misses("marking") as f64;
    assert!(marking < 2.0 * harmonic * optimum as f64 + first as f64, "{marking}");
    // The distance of its layer protects the expert that comes next.
    assert!(misses("llru") < requests / 2, "{}", misses("llru"));
}
