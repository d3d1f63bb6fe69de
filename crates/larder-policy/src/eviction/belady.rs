//! Belady's optimum, for replays: a lower bound of misses.

use std::cmp::Reverse;
use std::sync::Arc;

use super::heap::Heap;
use super::{CacheShape, Eviction, FutureUses, Key, LayerChoice, NEVER, Policy, PolicyNeeds, per_pool};
use crate::PolicyError;

pub(super) const POLICY: Policy = Policy {
    name: "belady",
    about: "the expert that is needed again last: the optimum, in replays only",
    knobs: &[],
    needs: PolicyNeeds::Future,
    make: |_, shape, inputs| {
        let unsuitable = |problem: &str| PolicyError::Unsuitable { name: "belady", problem: problem.to_owned() };
        let future = inputs.future.as_ref();
        let future = future.ok_or_else(|| unsuitable("needs the future requests, which only a replay knows"))?;
        if !future.fits(shape) {
            return Err(unsuitable("was given the requests of a model of another size"));
        }
        Ok(per_pool(shape, |pool| Belady {
            future: future.clone(),
            shape: *shape,
            pool,
            visits: 0,
            now: 0,
            seen: vec![0; shape.keys_per_pool()],
            queue: Heap::new(shape.keys_per_pool()),
        }))
    },
};

/// Belady's rule: evicts the expert whose next use is farthest away.
struct Belady {
    future: Arc<FutureUses>,
    shape: CacheShape,
    pool: usize,
    /// Number of choices that layers of this pool have made.
    visits: usize,
    /// The step of the latest choice.
    now: u32,
    /// For each key, the number of its uses that are past.
    seen: Vec<u32>,
    /// Keys by next use, the latest first.
    queue: Heap<Reverse<u32>>,
}

impl Belady {
    /// A key is used now: its rank becomes its next use.
    fn used(&mut self, key: Key) {
        let uses = self.future.uses(&self.shape, self.pool, key);
        let seen = &mut self.seen[key.index()];
        let over = |at: &u32| self.visits > 0 && *at <= self.now;
        while uses.get(*seen as usize).is_some_and(over) {
            *seen += 1;
        }
        let next = uses.get(*seen as usize).copied().unwrap_or(NEVER);
        self.queue.set(key, Reverse(next));
    }
}

impl Eviction for Belady {
    fn begin(&mut self, _: &LayerChoice) {
        self.now = self.future.step(self.shape.scope, self.pool, self.visits);
        self.visits += 1;
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
