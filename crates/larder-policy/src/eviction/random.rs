//! Random eviction: the baseline that uses no history.

use super::members::Members;
use super::{Eviction, Key, Policy, PolicyNeeds, SEED, per_pool, seed};
use larder_core::Rng;

pub(super) const POLICY: Policy = Policy {
    name: "random",
    about: "a random expert",
    knobs: &[SEED],
    needs: PolicyNeeds::Nothing,
    make: |options, shape, _| {
        let members = || Members::new(shape.keys_per_pool());
        Ok(per_pool(shape, |pool| Random { members: members(), rng: Rng::with_stream(seed(options), pool as u64) }))
    },
};

/// Draws the victim among all evictable keys, each equally likely.
struct Random {
    members: Members,
    rng: Rng,
}

impl Eviction for Random {
    fn admit(&mut self, key: Key) {
        self.members.add(key);
    }

    fn touch(&mut self, _: Key) {}

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.members.draw(&mut self.rng, evictable)
    }

    fn forget(&mut self, key: Key) {
        self.members.remove(key);
    }
}
