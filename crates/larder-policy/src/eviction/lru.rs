//! LRU: the expert that was not used for longest leaves first.

use super::queues::Queues;
use super::{Eviction, Key, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "lru",
    about: "least recently used; of experts that came together, the best-ranked leaves first",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| Lru(Queues::new(shape.keys_per_pool(), 1)))),
};

/// Least recently used. Experts that one layer wants together are used in the order of their rank, best first.
struct Lru(Queues);

impl Eviction for Lru {
    fn admit(&mut self, key: Key) {
        self.0.push(0, key);
    }

    fn touch(&mut self, key: Key) {
        self.0.push(0, key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.0.find(0, evictable)
    }

    fn forget(&mut self, key: Key) {
        self.0.remove(key);
    }
}
