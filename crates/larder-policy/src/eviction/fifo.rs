//! FIFO: the expert that came in first leaves first.

use super::queues::Queues;
use super::{Eviction, Key, Policy, PolicyNeeds, per_pool};

pub(super) const POLICY: Policy = Policy {
    name: "fifo",
    about: "first in, first out; of experts that came together, the best-ranked leaves first",
    knobs: &[],
    needs: PolicyNeeds::Nothing,
    make: |_, shape, _| Ok(per_pool(shape, |_| Fifo(Queues::new(shape.keys_per_pool(), 1)))),
};

/// First in, first out: uses do not change the order.
struct Fifo(Queues);

impl Eviction for Fifo {
    fn admit(&mut self, key: Key) {
        self.0.push(0, key);
    }

    fn touch(&mut self, _: Key) {}

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.0.find(0, evictable)
    }

    fn forget(&mut self, key: Key) {
        self.0.remove(key);
    }
}
