use super::members::Members;
use super::{Eviction, Key, Policy, SEED, per_pool, seed};
use crate::rng::Rng;

pub(super) const POLICY: Policy = Policy {
    name: "marking",
    about: "anybody who was not used in this phase; a phase ends when all were",
    knobs: &[SEED],
    make: |options, shape, _| {
        let members = || Members::new(shape.keys_per_pool());
        Ok(per_pool(shape, |pool| Marking { members: members(), rng: Rng::new(seed(options), pool as u64) }))
    },
};

/// The randomised marking algorithm: each use marks; who leaves is drawn among those without a mark. When room is
/// needed and nobody without a mark may leave, all marks are wiped off.
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
