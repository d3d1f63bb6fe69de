use std::cmp::Reverse;
use std::sync::Arc;

use super::heap::Heap;
use super::{CacheShape, Eviction, FutureUses, Key, LayerChoice, NEVER, Policy, per_pool};
use crate::PolicyError;

pub(super) const POLICY: Policy = Policy {
    name: "belady",
    about: "who is needed again last: the optimum, for replays alone",
    knobs: &[],
    make: |_, shape, inputs| {
        let unsuitable = |problem: &str| PolicyError::Unsuitable { name: "belady", problem: problem.to_owned() };
        let future = inputs.future.as_ref();
        let future = future.ok_or_else(|| unsuitable("needs the requests to come, which only a replay knows"))?;
        if !future.fits(shape) {
            return Err(unsuitable("was given requests of a model of another size"));
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
    /// How often a layer of this pool has chosen.
    visits: usize,
    /// The step of the last choice.
    now: u32,
    /// How many uses of each key are over.
    seen: Vec<u32>,
    /// By next use, the last first.
    queue: Heap<Reverse<u32>>,
}

impl Belady {
    /// A key was used now: what counts is its next use.
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
