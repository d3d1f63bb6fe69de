//! Policies that order the residents, against that order computed from the whole history.

use larder_core::{CacheScope, MoeRow};
use proptest::prelude::*;

use super::rig::{Rig, Use, VictimCheck, groups, no_future, shape};
use super::*;

/// The uses of a key so far, each with its position among all.
fn uses(rig: &Rig, pool: usize, key: Key) -> impl DoubleEndedIterator<Item = (usize, &Use)> {
    rig.uses.iter().enumerate().filter(move |(_, u)| u.pool == pool && u.key == key)
}

fn last(rig: &Rig, pool: usize, key: Key) -> usize {
    uses(rig, pool, key).next_back().unwrap().0
}

/// The place of a key in the order of eviction: the lowest is the victim.
type Order = fn(&Rig, usize, Key) -> Vec<f64>;

fn lru(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    vec![last(rig, pool, key) as f64]
}

fn fifo(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    vec![uses(rig, pool, key).rfind(|(_, u)| u.came).unwrap().0 as f64]
}

fn lfu(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    let came = fifo(rig, pool, key)[0] as usize;
    let since = uses(rig, pool, key).filter(|(at, _)| *at >= came).count();
    vec![since as f64, last(rig, pool, key) as f64]
}

/// The sequence of the last use, and the uses in it, resident or not.
fn lfu_keep(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    let latest = uses(rig, pool, key).next_back().unwrap().1.sequence;
    let count = uses(rig, pool, key).filter(|(_, u)| u.sequence == latest).count();
    vec![latest as f64, count as f64, last(rig, pool, key) as f64]
}

fn llru(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    let rows = rig.shape.keys_per_pool() / rig.shape.experts;
    let then = uses(rig, pool, key).next_back().unwrap().1.time;
    let rounds = (rig.time[pool] - then) / rows;
    let distance = (rig.shape.expert(pool, key).row.index() + rows - rig.row.index() % rows) % rows;
    vec![-(rounds as f64), -(distance as f64), last(rig, pool, key) as f64]
}

/// With a half-life of 2 tokens.
fn lfru(rig: &Rig, pool: usize, key: Key) -> Vec<f64> {
    let rows = rig.shape.keys_per_pool() / rig.shape.experts;
    let age = |u: &Use| (rig.time[pool] - u.time) as f64 / (2 * rows) as f64;
    vec![uses(rig, pool, key).map(|(_, u)| (-age(u)).exp2()).sum()]
}

/// Checks that the victim is the lowest; numbers that differ only by rounding are equal.
fn check_victim(order: Order) -> VictimCheck {
    Box::new(move |rig, pool, victim, others| {
        let mine = order(rig, pool, victim);
        for other in others {
            for (mine, theirs) in mine.iter().zip(order(rig, pool, *other)) {
                let same = (mine - theirs).abs() <= 1e-9 * mine.abs();
                assert!(same || *mine < theirs, "{other:?} should leave before {victim:?}");
                if !same {
                    break;
                }
            }
        }
    })
}

proptest! {
    #[test]
    fn the_victim_is_the_lowest_of_the_order(
        choices in prop::collection::vec((groups(4), any::<bool>(), prop::bool::weighted(0.03)), 1..150),
        slots in 4usize..12,
        global in any::<bool>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let orders: [(&str, Order); 6] = [
            ("lru", lru),
            ("fifo", fifo),
            ("lfu", lfu),
            ("lfu:keep", lfu_keep),
            ("llru", llru),
            ("lfru:half-life=2", lfru),
        ];
        for (spec, order) in orders {
            let mut rig = Rig::new(spec, &shape(slots, scope), no_future());
            rig.victim_check = Some(check_victim(order));
            for ((row, wanted), prefetch, new_sequence) in &choices {
                if *new_sequence {
                    rig.new_sequence();
                }
                rig.serve(*row, wanted);
                if *prefetch {
                    rig.prefetch(MoeRow((row.index() + 1) % 3).expert(wanted[0]));
                }
            }
        }
    }

    /// An unmarked key is the victim; when no unmarked key is evictable, all marks are cleared.
    #[test]
    fn marking_spares_keys_used_in_this_phase(
        choices in prop::collection::vec(groups(4), 1..150),
        slots in 4usize..12,
    ) {
        let mut rig = Rig::new("marking:seed=3", &shape(slots, CacheScope::Global), no_future());
        let phase = std::cell::Cell::new(0);
        rig.victim_check = Some(Box::new(move |rig, pool, victim, others| {
            let marked = |key: Key| last(rig, pool, key) >= phase.get();
            if others.iter().all(|k| marked(*k)) {
                phase.set(rig.uses.len());
            }
            assert!(!marked(victim));
        }));
        choices.iter().for_each(|(row, wanted)| rig.serve(*row, wanted));
    }
}

#[test]
fn every_evictable_key_may_be_drawn() {
    let mut rig = Rig::new("random:seed=5", &shape(6, CacheScope::Layer), no_future());
    for expert in 0..6 {
        rig.serve(MoeRow(0), &[expert]);
    }
    let mut drawn = [0; 6];
    for _ in 0..4000 {
        let victim = rig.policies[0].victim(&|k| k != Key(2) && k != Key(4)).unwrap();
        drawn[victim.index()] += 1;
    }
    assert_eq!((drawn[2], drawn[4]), (0, 0));
    assert!([0, 1, 3, 5].into_iter().all(|k| (850..1150).contains(&drawn[k])), "{drawn:?}");
}
