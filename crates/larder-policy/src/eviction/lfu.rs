//! LFU: the expert used least often since it came in leaves first.

use super::frequencies::Frequencies;
use super::{Eviction, Key, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "lfu",
    about: "least frequently used since it came in, and among equals least recently",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| Lfu(Frequencies::new(shape.keys_per_pool())))),
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
