//! Belady's rule against a search over all possible evictions.

use larder_core::{CacheScope, MoeRow};
use proptest::prelude::*;

use super::rig::{EXPERTS, ROWS, Rig, groups, shape};
use super::*;

type Choices = Vec<(MoeRow, Vec<usize>)>;

fn misses(spec: &str, shape: &CacheShape, choices: &Choices) -> usize {
    let mut rig = Rig::new(spec, shape, Arc::new(FutureUses::new(ROWS, EXPERTS, choices.clone())));
    choices.iter().for_each(|(row, wanted)| rig.serve(*row, wanted));
    rig.misses
}

/// The least number of misses from `residents` on, a set of keys as bits, by trying every set that could stay.
fn least(shape: &CacheShape, choices: &[(MoeRow, Vec<usize>)], residents: u32) -> usize {
    let Some(((row, wanted), rest)) = choices.split_first() else { return 0 };
    let wanted: u32 = wanted.iter().map(|e| 1 << shape.key(row.expert(*e)).0).sum();
    let others = residents & !wanted;
    let missed = (wanted & !residents).count_ones() as usize;
    let room = shape.slots - wanted.count_ones() as usize;
    let mut best = usize::MAX;
    let mut kept = others;
    loop {
        // Keeping fewer than fit never helps.
        if kept.count_ones() as usize == room.min(others.count_ones() as usize) {
            best = best.min(least(shape, rest, wanted | kept));
        }
        if kept == 0 {
            return missed + best;
        }
        kept = (kept - 1) & others;
    }
}

proptest! {
    #[test]
    fn nothing_misses_less_than_belady(choices in prop::collection::vec(groups(2), 1..9), slots in 2usize..5) {
        let shape = shape(slots, CacheScope::Global);
        prop_assert_eq!(misses("belady", &shape, &choices), least(&shape, &choices, 0));
    }

    #[test]
    fn no_policy_beats_belady(
        choices in prop::collection::vec(groups(4), 1..200),
        slots in 4usize..12,
        global in any::<bool>(),
    ) {
        let shape = shape(slots, if global { CacheScope::Global } else { CacheScope::Layer });
        let optimum = misses("belady", &shape, &choices);
        for spec in compared_specs().map(|spec| spec.to_string()) {
            prop_assert!(misses(&spec, &shape, &choices) >= optimum, "{}", spec);
        }
    }
}
