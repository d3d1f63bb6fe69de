//! Policies that remember who left are told the truth: whoever they name as leaving leaves.

use larder_policy::eviction::{Eviction, Key, Step};

use super::*;

/// A policy that wants its victims to leave, and at once.
struct Strict {
    policy: Box<dyn Eviction>,
    victim: Option<Key>,
}

impl Eviction for Strict {
    fn begin(&mut self, step: &Step) {
        self.policy.begin(step);
    }

    fn admit(&mut self, key: Key) {
        assert_eq!(self.victim, None, "somebody comes before the victim has left");
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
        assert!(self.victim.take().is_none_or(|victim| victim == key), "somebody else leaves");
        self.policy.forget(key);
    }
}

#[test]
fn who_only_moves_between_tiers_is_nobodys_victim() {
    for name in ["arc", "lecar", "lru"] {
        for measured in [COPY, HOST] {
            for (scope, device, host) in
                [(CacheScope::Layer, 2, 2), (CacheScope::Global, 3, 4), (CacheScope::Layer, 2, 0)]
            {
                let setting = setting(scope, device, host);
                let mut bench = Bench::with(&setting, measured, name, |m| m, |d| d.polled(2)).unwrap();
                let policies =
                    name.parse::<EvictionSpec>().unwrap().make(&setting.policies(), &Help::default()).unwrap();
                let strict = |policy| Box::new(Strict { policy, victim: None }) as Box<dyn Eviction>;
                bench.cache.set_policies(policies.into_iter().map(strict).collect());
                for i in 0..200u16 {
                    let wanted: Vec<u16> = (0..=i % 4).map(|j| (i * i / 7 + j) % 6).collect();
                    bench.visit(i % 3, &wanted, 1).unwrap();
                }
                let counts = bench.traffic().counts;
                assert!(counts.promotions > 0 && counts.lost > 0, "{name} {counts:?}");
            }
        }
    }
}
