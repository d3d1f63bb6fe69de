//! The randomised marking algorithm.

use super::members::Members;
use super::{Eviction, Key, Policy, PolicyNeeds, SEED, per_pool, seed};
use larder_core::Rng;

pub(super) const POLICY: Policy = Policy {
    name: "marking",
    about: "a random expert that was not used in this phase; a phase ends when all were used",
    knobs: &[SEED],
    needs: PolicyNeeds::Nothing,
    make: |options, shape, _| {
        let members = || Members::new(shape.keys_per_pool());
        Ok(per_pool(shape, |pool| Marking { members: members(), rng: Rng::with_stream(seed(options), pool as u64) }))
    },
};

/// The randomised marking algorithm: each use marks a key, and the victim is drawn among unmarked keys. When a victim
/// is needed and no unmarked key is evictable, all marks are cleared.
struct Marking {
    members: Members,
    rng: Rng,
}

impl Eviction for Marking {
    fn admit(&mut self, key: Key) {
        self.members.add(key);
        self.members.mark(key);
    }

    fn touch(&mut self, key: Key) {
        self.members.mark(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.members.draw(&mut self.rng, evictable).or_else(|| {
            self.members.clear_marks();
            self.members.draw(&mut self.rng, evictable)
        })
    }

    fn forget(&mut self, key: Key) {
        self.members.remove(key);
    }
}
