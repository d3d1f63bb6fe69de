//! LFU: the least frequently used expert leaves first, counted since it came in or over the whole sequence.

use super::frequencies::Frequencies;
use super::heap::Heap;
use super::{Eviction, Key, Policy, PolicyNeeds, per_pool};
use crate::spec::{Domain, Knob};

pub(super) const POLICY: Policy = Policy {
    name: "lfu",
    about: "least frequently used since it came in, and among equals least recently",
    knobs: &[Knob {
        name: "keep",
        about: "count all uses in the sequence, also those before an eviction",
        domain: Domain::Switch,
        default: Some("no"),
    }],
    needs: PolicyNeeds::Nothing,
    make: |options, shape, _| {
        let keys = shape.keys_per_pool();
        Ok(if options.is_on("keep") {
            per_pool(shape, |_| LfuKeep::new(keys))
        } else {
            per_pool(shape, |_| Lfu(Frequencies::new(keys)))
        })
    },
};

/// Least frequently used: an expert that leaves and comes back starts from one use.
struct Lfu(Frequencies);

impl Eviction for Lfu {
    fn admit(&mut self, key: Key) {
        self.0.add(key);
    }

    fn touch(&mut self, key: Key) {
        self.0.raise(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.0.find(evictable)
    }

    fn forget(&mut self, key: Key) {
        self.0.remove(key);
    }
}

/// The uses of an expert in the last sequence that used it, in the order of eviction.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct SequenceUses {
    /// Number of that sequence.
    sequence: u64,
    /// Uses in it so far.
    count: u64,
    /// The last use, counted over all keys: breaks ties.
    last: u64,
}

/// Least frequently used in this sequence, resident or not: an expert that leaves and comes back has its old count.
///
/// Counts begin anew with each sequence. Residents that it has not used yet leave first, and among those the least
/// frequently used one of the last sequence that used them.
struct LfuKeep {
    sequence: u64,
    uses: u64,
    of: Vec<SequenceUses>,
    queue: Heap<SequenceUses>,
}

impl LfuKeep {
    fn new(keys: usize) -> Self {
        LfuKeep { sequence: 0, uses: 0, of: vec![SequenceUses::default(); keys], queue: Heap::new(keys) }
    }

    fn used(&mut self, key: Key) {
        let of = &mut self.of[key.index()];
        let before = if of.sequence == self.sequence { of.count } else { 0 };
        self.uses += 1;
        *of = SequenceUses { sequence: self.sequence, count: before + 1, last: self.uses };
        self.queue.set(key, *of);
    }
}

impl Eviction for LfuKeep {
    fn new_sequence(&mut self) {
        self.sequence += 1;
    }

    fn admit(&mut self, key: Key) {
        self.used(key);
    }

    fn touch(&mut self, key: Key) {
        self.used(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.queue.find(evictable)
    }

    fn forget(&mut self, key: Key) {
        self.queue.remove(key);
    }
}
