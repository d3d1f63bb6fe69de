//! Belady's rule against all that could have been done.

use larder_core::CacheScope;
use proptest::prelude::*;

use super::rig::{EXPERTS, ROWS, Rig, groups, setting};
use super::*;

type Choices = Vec<(usize, Vec<usize>)>;

fn misses(spec: &str, setting: &Setting, choices: &Choices) -> usize {
    let mut rig = Rig::new(spec, setting, Arc::new(Future::new(ROWS, EXPERTS, choices.clone())));
    choices.iter().for_each(|(row, wanted)| rig.serve(*row, wanted));
    rig.misses
}

/// The least number of misses from `residents` on, a set of keys as bits, by trying every set that might stay.
fn least(setting: &Setting, choices: &[(usize, Vec<usize>)], residents: u32) -> usize {
    let Some(((row, wanted), rest)) = choices.split_first() else { return 0 };
    let wanted: u32 = wanted.iter().map(|e| 1 << setting.key(*row, *e).0).sum();
    let others = residents & !wanted;
    let missed = (wanted & !residents).count_ones() as usize;
    let room = setting.slots - wanted.count_ones() as usize;
    let mut best = usize::MAX;
    let mut kept = others;
    loop {
        // Keeping fewer than fit never helps.
        if kept.count_ones() as usize == room.min(others.count_ones() as usize) {
            best = best.min(least(setting, rest, wanted | kept));
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
        let setting = setting(slots, CacheScope::Global);
        prop_assert_eq!(misses("belady", &setting, &choices), least(&setting, &choices, 0));
    }

    #[test]
    fn no_policy_beats_belady(
        choices in prop::collection::vec(groups(4), 1..200),
        slots in 4usize..12,
        global in any::<bool>(),
    ) {
        let setting = setting(slots, if global { CacheScope::Global } else { CacheScope::Layer });
        let optimum = misses("belady", &setting, &choices);
        for policy in POLICIES {
            prop_assert!(misses(policy.name, &setting, &choices) >= optimum, "{}", policy.name);
        }
    }
}
