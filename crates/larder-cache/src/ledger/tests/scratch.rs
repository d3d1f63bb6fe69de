//! Slots that all pools share: who passes through need not displace anybody.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_policy::eviction::{Future, POLICIES};

use super::*;

fn setting(slots: usize, scope: CacheScope, scratch: usize) -> Setting {
    Setting { rows: LAYERS, experts: EXPERTS, top_k: 2, slots, scope, scratch }
}

fn help(visits: &[(usize, Vec<usize>)]) -> Help {
    let future = Future::new(LAYERS, EXPERTS, visits.iter().cloned());
    Help { future: Some(Arc::new(future)), ..Help::default() }
}

fn misses(policy: &str, setting: &Setting, visits: &[(usize, Vec<usize>)]) -> u64 {
    let mut ledger = with(policy, setting, &help(visits));
    visits.iter().for_each(|(row, wanted)| visit(&mut ledger, *row, wanted));
    ledger.counts().misses
}

#[test]
fn who_came_in_may_leave_again_when_the_wave_closes() {
    let visits: Vec<_> = [0, 1, 2, 0, 1].map(|e| (0, vec![e])).into();
    let mut ledger = with("belady", &setting(2, CacheScope::Layer, 1), &help(&visits));
    for (row, wanted) in &visits {
        ledger.begin(*row, wanted, &[]);
        let mut wave = open(&mut ledger, *row, wanted);
        assert!(wave.evicted.is_empty(), "there is a scratch slot");
        wave.misses.iter().for_each(|(e, _)| ledger.arrived(*row, *e));
        ledger.close(*row, &mut wave);
        assert_eq!(wave.evicted, if wanted == &[2] { vec![(0, 2)] } else { vec![] });
    }
    assert_eq!(ledger.counts(), Counts { hits: 2, misses: 3, evictions: 1, ..Counts::default() });
}

#[test]
fn more_fit_together_with_scratch_slots_but_no_more_stay() {
    let mut ledger = with("lru", &setting(2, CacheScope::Layer, 3), &Help::default());
    assert_eq!(ledger.capacity(), 5);
    let mut wave = open(&mut ledger, 1, &[0, 1, 2, 3, 4, 5]);
    assert_eq!(wave.len(), 5);
    wave.misses.iter().for_each(|(e, _)| ledger.arrived(1, *e));
    ledger.close(1, &mut wave);
    assert_eq!(wave.evicted, [(1, 0), (1, 1), (1, 2)]);
}

/// The least number of misses from `residents` on, a set of keys as bits, by trying every set that might stay.
fn least(setting: &Setting, visits: &[(usize, Vec<usize>)], residents: u32) -> u64 {
    let Some(((row, wanted), rest)) = visits.split_first() else { return 0 };
    let wanted: u32 = wanted.iter().map(|e| 1 << setting.key(*row, *e).0).sum();
    let there = residents | wanted;
    let missed = u64::from((wanted & !residents).count_ones());
    let most = there.count_ones().min(setting.slots as u32);
    let subsets = std::iter::successors(Some(there), |s| (*s > 0).then(|| (s - 1) & there));
    let kept = subsets.filter(|s| s.count_ones() == most);
    missed + kept.map(|s| least(setting, rest, s)).min().unwrap_or(0)
}

/// A visit, or something that goes wrong or comes unasked.
fn visits(most: usize) -> impl Strategy<Value = (usize, Vec<usize>)> {
    let experts: Vec<usize> = (0..EXPERTS).collect();
    (0..LAYERS, prop::sample::subsequence(experts, 1..=most).prop_shuffle())
}

proptest! {
    #[test]
    fn belady_is_optimal_where_nobody_has_to_stay(visits in prop::collection::vec(visits(2), 1..7), slots in 1usize..4) {
        let setting = setting(slots, CacheScope::Global, 2);
        prop_assert_eq!(misses("belady", &setting, &visits), least(&setting, &visits, 0));
    }

    #[test]
    fn no_policy_beats_belady_with_scratch_slots(
        visits in prop::collection::vec(visits(3), 1..120),
        slots in 3usize..9,
        scratch in 0usize..4,
        global in any::<bool>(),
    ) {
        let setting = setting(slots, if global { CacheScope::Global } else { CacheScope::Layer }, scratch);
        let optimum = misses("belady", &setting, &visits);
        for policy in POLICIES.iter().filter(|p| p.name != "learned") {
            prop_assert!(misses(policy.name, &setting, &visits) >= optimum, "{}", policy.name);
        }
    }

    /// Waves, guesses and failures under every policy: no slot is lost or given twice, no pool keeps more than it may.
    #[test]
    fn slots_are_conserved(
        visits in prop::collection::vec((visits(EXPERTS), 0usize..4, any::<bool>()), 1..60),
        slots in 1usize..7,
        scratch in 0usize..4,
        global in any::<bool>(),
        which in 0..POLICIES.len(),
    ) {
        let setting = setting(slots, if global { CacheScope::Global } else { CacheScope::Layer }, scratch);
        let known: Vec<_> = visits.iter().map(|(visit, ..)| visit.clone()).collect();
        let name = if POLICIES[which].name == "learned" { "lru" } else { POLICIES[which].name };
        let mut ledger = with(name, &setting, &help(&known));
        let (mut read, mut guessed) = (0, 0);
        for ((row, wanted), failing, guess) in &visits {
            let guess = (*guess).then(|| ((row + 1) % LAYERS, wanted[0]));
            let guess = guess.filter(|(row, e)| ledger.guess(*row, *e).is_some());
            guessed += usize::from(guess.is_some());
            ledger.begin(*row, wanted, &[]);
            let mut rest = &wanted[..];
            while !rest.is_empty() {
                let mut wave = open(&mut ledger, *row, rest);
                if wave.is_empty() {
                    break;
                }
                read += wave.misses.len();
                for (expert, _) in wave.misses.iter().chain(&wave.awaited) {
                    if *expert % 4 == *failing { ledger.failed(*row, *expert) } else { ledger.arrived(*row, *expert) }
                }
                check(&ledger, &setting, setting.all_slots());
                ledger.close(*row, &mut wave);
                prop_assert!(wave.evicted.iter().all(|(row, e)| ledger.is_absent(*row, *e)));
                rest = &rest[wave.len()..];
            }
            if let Some((row, expert)) = guess.filter(|(row, e)| ledger.in_flight(*row, *e).is_some()) {
                ledger.arrived(row, expert);
            }
            check(&ledger, &setting, setting.slots);
        }
        prop_assert_eq!(ledger.counts().misses, read as u64);
        prop_assert_eq!(ledger.counts().guesses, guessed as u64);
    }
}

/// Everybody in memory has a slot of their own, and no pool has more than `most`.
fn check(ledger: &Ledger, setting: &Setting, most: usize) {
    let mut taken = BTreeSet::new();
    let mut held = vec![0; setting.pools()];
    for row in 0..LAYERS {
        for expert in 0..EXPERTS {
            if let State::Resident(slot) | State::InFlight(slot) | State::Guessed(slot) =
                ledger.entries[ledger.at(row, expert)].state
            {
                assert!(taken.insert(slot) && (slot as usize) < setting.all_slots());
                held[setting.pool(row)] += 1;
            }
        }
    }
    assert!(held.iter().all(|held| *held <= most), "{held:?}");
    let free = ledger.pools.iter().map(|p| p.free.len()).sum::<usize>() + ledger.scratch.len();
    assert_eq!(taken.len() + free, setting.all_slots(), "a slot was lost");
}
