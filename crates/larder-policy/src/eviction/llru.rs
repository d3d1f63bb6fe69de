//! Layered LRU, which also counts when each layer's turn comes.

use super::queues::Queues;
use super::{CacheShape, Eviction, Key, LayerChoice, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "llru",
    about: "unused for most rounds through the layers, and among equals the layer whose turn comes last",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| Llru::new(shape))),
};

/// Layered LRU. With several experts per layer, those that a layer wants together are used at the same time; of experts
/// equal in both respects, the one admitted or touched first leaves, which is the best-ranked.
///
/// In layer scope a round is one step and all distances are equal, so this is LRU.
struct Llru {
    /// Rows of this pool.
    rows: usize,
    /// Experts per row.
    experts: usize,
    /// Resident experts, one queue per row, least recently used first.
    queues: Vec<Queues>,
    /// The last use of each key, in steps.
    last: Vec<u64>,
    now: u64,
    /// The row of the latest choice.
    row: usize,
}

impl Llru {
    fn new(shape: &CacheShape) -> Self {
        let rows = shape.keys_per_pool() / shape.experts;
        Llru {
            rows,
            experts: shape.experts,
            queues: (0..rows).map(|_| Queues::new(shape.experts, 1)).collect(),
            last: vec![0; shape.keys_per_pool()],
            now: 0,
            row: 0,
        }
    }

    fn split(&self, key: Key) -> (usize, Key) {
        (key.index() / self.experts, Key(key.0 % self.experts as u32))
    }

    fn join(&self, row: usize, expert: Key) -> Key {
        Key((row * self.experts) as u32 + expert.0)
    }

    fn used(&mut self, key: Key) {
        let (row, expert) = self.split(key);
        self.last[key.index()] = self.now;
        self.queues[row].push(0, expert);
    }

    /// Full rounds since the last use of a key.
    fn rounds(&self, key: Key) -> u64 {
        (self.now - self.last[key.index()]) / self.rows as u64
    }
}

impl Eviction for Llru {
    fn begin(&mut self, choice: &LayerChoice) {
        self.now += 1;
        self.row = choice.row.index() % self.rows;
    }

    fn admit(&mut self, key: Key) {
        self.used(key);
    }

    fn touch(&mut self, key: Key) {
        self.used(key);
    }

    /// Goes through the rows from the one before the present row, whose turn comes last, to the present row, which is
    /// at distance 0.
    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        let mut best: Option<(u64, Key)> = None;
        for distance in (0..self.rows).rev() {
            let row = (self.row + distance) % self.rows;
            let more = |key: Key| best.is_none_or(|(rounds, _)| self.rounds(key) > rounds);
            let oldest = self.queues[row].oldest(0).map(|e| self.join(row, e));
            if !oldest.is_some_and(more) {
                continue;
            }
            let found = self.queues[row].find(0, &|e| evictable(self.join(row, e))).map(|e| self.join(row, e));
            if let Some(key) = found.filter(|key| more(*key)) {
                best = Some((self.rounds(key), key));
            }
        }
        best.map(|(_, key)| key)
    }

    fn forget(&mut self, key: Key) {
        let (row, expert) = self.split(key);
        self.queues[row].remove(expert);
    }
}
