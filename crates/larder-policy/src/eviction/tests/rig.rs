//! A plain ledger for tests: sets of residents, every victim checked.

use std::collections::BTreeSet;

use larder_core::{CacheScope, ExpertKey, MoeRow};
use proptest::prelude::*;

use super::*;

pub const ROWS: usize = 3;
pub const EXPERTS: usize = 6;

pub fn shape(slots: usize, scope: CacheScope) -> CacheShape {
    CacheShape { rows: ROWS, experts: EXPERTS, top_k: 2, slots, scope, scratch: 0 }
}

/// A row and up to `most` of its experts.
pub fn groups(most: usize) -> impl Strategy<Value = (MoeRow, Vec<usize>)> {
    let experts: Vec<usize> = (0..EXPERTS).collect();
    ((0..ROWS).prop_map(MoeRow), prop::sample::subsequence(experts, 1..=most).prop_shuffle())
}

/// A future for policies that need none.
pub fn no_future() -> Arc<FutureUses> {
    Arc::new(FutureUses::new(0, 0, std::iter::empty::<(MoeRow, [usize; 0])>()))
}

/// A key of a pool was used.
#[derive(Clone, Copy)]
pub struct Use {
    pub pool: usize,
    pub key: Key,
    /// Whether the key came in with this use.
    pub came: bool,
    /// Number of choices that layers of the pool had made.
    pub time: usize,
    /// The sequence, from 0.
    pub sequence: usize,
}

pub struct Rig {
    pub shape: CacheShape,
    pub policies: Vec<Box<dyn Eviction>>,
    pub residents: Vec<BTreeSet<Key>>,
    pub uses: Vec<Use>,
    /// Number of choices of each pool.
    pub time: Vec<usize>,
    /// The row of the latest choice.
    pub row: MoeRow,
    /// The sequence that is being served, from 0.
    pub sequence: usize,
    pub victims: Vec<ExpertKey>,
    pub misses: usize,
    /// Asserts that a victim is the right one among the evictable keys.
    pub victim_check: Option<VictimCheck>,
}

pub type VictimCheck = Box<dyn Fn(&Rig, usize, Key, &[Key])>;

impl Rig {
    pub fn new(spec: &str, shape: &CacheShape, future: Arc<FutureUses>) -> Self {
        let evictor = learned::testing::evictor(learned::MoeSize::of(shape));
        let inputs = PolicyInputs { future: Some(future), evictor: Some(Arc::new(evictor)) };
        Rig {
            shape: *shape,
            policies: spec.parse::<EvictionSpec>().unwrap().make(shape, &inputs).unwrap(),
            residents: vec![BTreeSet::new(); shape.pools()],
            uses: Vec::new(),
            time: vec![0; shape.pools()],
            row: MoeRow(0),
            sequence: 0,
            victims: Vec::new(),
            misses: 0,
            victim_check: None,
        }
    }

    /// A layer chooses; the caller guarantees that all of `wanted` fit.
    pub fn serve(&mut self, row: MoeRow, wanted: &[usize]) {
        let pool = self.shape.pool(row);
        let keys: Vec<Key> = wanted.iter().map(|e| self.shape.key(row.expert(*e))).collect();
        self.time[pool] += 1;
        self.row = row;
        self.policies[pool].begin(&LayerChoice { row, wanted, tokens: &vec![1; wanted.len()], logits: &[] });
        for key in &keys {
            if self.residents[pool].contains(key) {
                self.policies[pool].touch(*key);
                self.used(pool, *key, false);
            } else {
                self.misses += 1;
                self.admit(pool, *key, &keys);
            }
        }
    }

    /// A new sequence begins, with the residents of the one before.
    pub fn new_sequence(&mut self) {
        self.sequence += 1;
        self.policies.iter_mut().for_each(|p| p.new_sequence());
    }

    /// An expert comes in that no layer chose.
    pub fn prefetch(&mut self, expert: ExpertKey) {
        let (pool, key) = (self.shape.pool(expert.row), self.shape.key(expert));
        if !self.residents[pool].contains(&key) {
            self.admit(pool, key, &[]);
        }
    }

    /// An expert leaves without being evicted, as after a failed read.
    pub fn fail(&mut self, expert: ExpertKey) {
        let (pool, key) = (self.shape.pool(expert.row), self.shape.key(expert));
        if self.residents[pool].remove(&key) {
            self.policies[pool].forget(key);
        }
    }

    /// Where no key is evictable, there is no victim.
    pub fn check_refusal(&mut self) {
        self.policies.iter_mut().for_each(|p| assert_eq!(p.worst(&|_| false), None));
        self.policies.iter_mut().for_each(|p| assert_eq!(p.victim(&|_| false), None));
    }

    /// Asks for the worst key, which does not evict it.
    pub fn check_worst(&mut self) {
        for (policy, residents) in self.policies.iter_mut().zip(&self.residents) {
            let worst = policy.worst(&|key| residents.contains(&key)).expect("a key is in the pool");
            assert!(residents.contains(&worst), "{worst:?} is not in");
        }
    }

    fn admit(&mut self, pool: usize, key: Key, pinned: &[Key]) {
        if self.residents[pool].len() == self.shape.slots {
            self.evict(pool, pinned);
        }
        self.policies[pool].admit(key);
        self.residents[pool].insert(key);
        self.used(pool, key, true);
    }

    fn evict(&mut self, pool: usize, pinned: &[Key]) {
        let residents = &self.residents[pool];
        let evictable = |key: Key| {
            assert!(key.index() < self.shape.keys_per_pool(), "{key:?} is out of range");
            residents.contains(&key) && !pinned.contains(&key)
        };
        let victim = self.policies[pool].victim(&evictable).expect("a key is evictable");
        assert!(evictable(victim), "{victim:?} is not evictable");
        if let Some(check_victim) = &self.victim_check {
            let others: Vec<Key> = residents.iter().copied().filter(|k| evictable(*k)).collect();
            check_victim(self, pool, victim, &others);
        }
        self.policies[pool].forget(victim);
        self.residents[pool].remove(&victim);
        self.victims.push(self.shape.expert(pool, victim));
    }

    fn used(&mut self, pool: usize, key: Key, came: bool) {
        self.uses.push(Use { pool, key, came, time: self.time[pool], sequence: self.sequence });
    }
}
