//! The two tiers under LRU against plain lists.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

type Expert = (usize, usize);

/// One pool under LRU where everything is computed on the device.
#[derive(Default)]
struct Pool {
    /// All experts in either tier, the least recently used first.
    order: Vec<Expert>,
    device: BTreeSet<Expert>,
    memory: BTreeSet<Expert>,
}

impl Pool {
    fn oldest(&self, fits: impl Fn(&Expert) -> bool) -> Option<Expert> {
        self.order.iter().copied().find(fits)
    }

    fn visit(&mut self, expert: Expert, device_slots: usize, memory_slots: usize) {
        let was_known = self.order.contains(&expert);
        self.order.retain(|e| *e != expert);
        self.order.push(expert);
        if self.device.contains(&expert) {
            return;
        }
        let mut passes = false;
        if !was_known {
            passes = self.memory.len() == memory_slots;
            if !passes {
                self.memory.insert(expert);
            }
        }
        if self.device.len() == device_slots {
            let victim = self.oldest(|e| self.device.contains(e)).unwrap();
            self.device.remove(&victim);
            self.demote(victim, expert, memory_slots);
        }
        self.device.insert(expert);
        if passes && memory_slots > 0 {
            // It stays in memory as well if an older expert there is also on the device: that copy gives up its slot.
            if self.memory.len() == memory_slots {
                let copy =
                    self.oldest(|e| self.device.contains(e) && (self.memory.contains(e) || *e == expert)).unwrap();
                if copy == expert {
                    return;
                }
                self.memory.remove(&copy);
            }
            self.memory.insert(expert);
        }
    }

    fn demote(&mut self, victim: Expert, expert: Expert, memory_slots: usize) {
        if self.memory.contains(&victim) {
            return;
        }
        if self.memory.len() == memory_slots {
            let copy = self.oldest(|e| self.device.contains(e) && self.memory.contains(e));
            let alone =
                || self.oldest(|e| self.memory.contains(e) && !self.device.contains(e) && *e != expert || *e == victim);
            let leaves = if memory_slots == 0 { victim } else { copy.or_else(alone).unwrap() };
            if !self.device.contains(&leaves) {
                self.order.retain(|e| *e != leaves);
            }
            if leaves == victim {
                return;
            }
            self.memory.remove(&leaves);
        }
        self.memory.insert(victim);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn behaves_as_lists_do(
        visits in prop::collection::vec((0..LAYERS, 0..EXPERTS), 100..300),
        device in 1usize..6,
        host in 0usize..6,
        global in any::<bool>(),
        polled in 0u64..3,
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let shape = shape(scope, device, host);
        let mut fixture = Fixture::with(&shape, COPY, "lru", |m| m, |d| d.polled(polled)).unwrap();
        let mut pools: Vec<Pool> = (0..LAYERS).map(|_| Pool::default()).collect();
        for (row, expert) in visits {
            // Fresh costs, so that no expert is tried out on the CPU.
            fixture.cache.links.costs = CostModel::new(COPY);
            fixture.visit(row as u16, &[expert as u16], 1).unwrap();
            pools[if global { 0 } else { row }].visit((row, expert), device, host);
            for (row, expert) in (0..LAYERS).flat_map(|row| (0..EXPERTS).map(move |e| (row, e))) {
                let there = |tier: fn(&Pool) -> &BTreeSet<Expert>| pools.iter().any(|p| tier(p).contains(&(row, expert)));
                prop_assert_eq!(fixture.is_on_device(row, expert), there(|p| &p.device), "{} {} on the device", row, expert);
                prop_assert_eq!(fixture.is_in_memory(row, expert), there(|p| &p.memory), "{} {} in memory", row, expert);
            }
        }
    }
}
