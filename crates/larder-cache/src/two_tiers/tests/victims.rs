//! Tests with policies that remember their victims: each victim that they name leaves.

use larder_policy::eviction::{Eviction, Key, LayerChoice};

use super::*;

/// A policy that checks that each of its victims leaves at once.
struct StrictPolicy {
    policy: Box<dyn Eviction>,
    victim: Option<Key>,
}

impl Eviction for StrictPolicy {
    fn begin(&mut self, choice: &LayerChoice) {
        self.policy.begin(choice);
    }

    fn admit(&mut self, key: Key) {
        assert_eq!(self.victim, None, "an expert comes in before the victim has left");
        self.policy.admit(key);
    }

    fn touch(&mut self, key: Key) {
        self.policy.touch(key);
    }

    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        assert_eq!(self.victim, None, "the victim has not left");
        self.victim = self.policy.victim(evictable);
        self.victim
    }

    fn worst(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.policy.worst(evictable)
    }

    fn forget(&mut self, key: Key) {
        assert!(self.victim.take().is_none_or(|victim| victim == key), "an expert other than the victim leaves");
        self.policy.forget(key);
    }
}

#[test]
fn an_expert_that_only_moves_between_tiers_is_no_victim() {
    for name in ["arc", "lecar", "lru"] {
        for measured in [COPY, HOST] {
            for (scope, device, host) in
                [(CacheScope::Layer, 2, 2), (CacheScope::Global, 3, 4), (CacheScope::Layer, 2, 0)]
            {
                let shape = shape(scope, device, host);
                let mut fixture = Fixture::with(&shape, measured, name, |m| m, |d| d.polled(2)).unwrap();
                let policies = name
                    .parse::<EvictionSpec>()
                    .unwrap()
                    .make(&shape.policy_shape(), &PolicyInputs::default())
                    .unwrap();
                let strict = |policy| Box::new(StrictPolicy { policy, victim: None }) as Box<dyn Eviction>;
                fixture.cache.set_policies(policies.into_iter().map(strict).collect());
                for i in 0..200u16 {
                    let wanted: Vec<u16> = (0..=i % 4).map(|j| (i * i / 7 + j) % 6).collect();
                    fixture.visit(i % 3, &wanted, 1).unwrap();
                }
                let counts = fixture.traffic().counts;
                assert!(counts.promotions > 0 && counts.evictions > 0, "{name} {counts:?}");
            }
        }
    }
}
