//! Tests of the tier ledger alone, driven by arbitrary steps: its invariants hold after each.

use proptest::prelude::*;

use super::*;

/// An operation in flight, and the bytes that it brings, as the index of their expert.
enum Flight {
    Read { expert: ExpertKey, to: SlotIndex },
    In { expert: ExpertKey, to: SlotIndex, bytes: usize },
    Out { demotion: Demotion, bytes: usize },
}

/// The ledger, the content of every slot, and the operations in flight.
struct Machine {
    tiers: TierLedger,
    device: Vec<Option<usize>>,
    host: Vec<Option<usize>>,
    flights: Vec<Flight>,
    /// The row of the current visit, and its experts that are still wanted.
    wanted: (MoeRow, Vec<usize>),
}

impl Machine {
    fn new(shape: &TierShape, seed: u64) -> Self {
        let policy: EvictionSpec = format!("random:seed={seed}").parse().unwrap();
        Machine {
            tiers: TierLedger::new(shape, policy.make(&shape.policy_shape(), &PolicyInputs::default()).unwrap()),
            device: vec![None; shape.device.total_slots()],
            host: vec![None; shape.host.total_slots()],
            flights: Vec::new(),
            wanted: (MoeRow(0), Vec::new()),
        }
    }

    fn begin(&mut self, row: MoeRow, first: usize, count: usize) {
        if self.wanted.1.is_empty() {
            let experts: Vec<usize> = (first..first + count).map(|e| e % EXPERTS).collect();
            let tokens = vec![1; experts.len()];
            self.tiers.begin(&LayerChoice { row, wanted: &experts, tokens: &tokens, logits: &[] });
            self.wanted = (row, experts);
        }
    }

    fn read(&mut self, which: usize) {
        let Some(expert) = self.pick(which) else { return };
        if self.tiers.locate(expert) == ExpertLocation::Absent
            && let Some(to) = self.tiers.read(expert)
        {
            self.host[to] = None;
            self.flights.push(Flight::Read { expert, to });
        }
    }

    fn prefetch(&mut self, expert: ExpertKey) {
        if let Some(to) = self.tiers.prefetch(expert) {
            self.host[to] = None;
            self.flights.push(Flight::Read { expert, to });
        }
    }

    fn promote(&mut self, expert: ExpertKey, reason: PromoteFor) {
        let Some(Promotion { from, to, demotion }) = self.tiers.promote(expert, reason) else { return };
        if let Some(demotion) = demotion {
            let bytes = self.device[to].expect("a demoted expert was on the device");
            self.host[demotion.to] = None;
            self.flights.push(Flight::Out { demotion, bytes });
        }
        self.device[to] = None;
        let bytes = self.host[from].expect("a promoted expert was in memory");
        self.flights.push(Flight::In { expert, to, bytes });
    }

    fn land(&mut self, which: usize, well: bool) {
        if self.flights.is_empty() {
            return;
        }
        match (self.flights.remove(which % self.flights.len()), well) {
            (Flight::Read { expert, to }, true) => {
                self.host[to] = Some(expert.index(EXPERTS));
                self.tiers.arrived(expert);
            }
            (Flight::Read { expert, .. }, false) => self.tiers.read_failed(expert),
            (Flight::In { expert, to, bytes }, true) => {
                self.device[to] = Some(bytes);
                self.tiers.promoted(expert);
            }
            (Flight::In { expert, .. }, false) => self.tiers.promotion_failed(expert),
            (Flight::Out { demotion: Demotion { expert, to }, bytes }, true) => {
                self.host[to] = Some(bytes);
                self.tiers.demoted(expert);
            }
            (Flight::Out { demotion: Demotion { expert, .. }, .. }, false) => {
                self.tiers.demotion_failed(expert);
            }
        }
    }

    fn finish(&mut self, which: usize) {
        let Some(expert) = self.pick(which) else { return };
        if self.tiers.locate(expert) != ExpertLocation::InFlight {
            self.tiers.unpin(expert);
            self.wanted.1.retain(|e| *e != expert.expert.index());
        }
    }

    fn pick(&self, which: usize) -> Option<ExpertKey> {
        let (row, wanted) = &self.wanted;
        Some(row.expert(*wanted.get(which % wanted.len().max(1))?))
    }

    /// Wanted experts that are not absent: only a failure or the end of computing may change that.
    fn computable(&self) -> Vec<usize> {
        let (row, wanted) = &self.wanted;
        let there = |e: &&usize| !matches!(self.tiers.locate(row.expert(**e)), ExpertLocation::Absent);
        wanted.iter().filter(there).copied().collect()
    }

    fn check(&self) {
        assert!(self.tiers.pair.host.is_whole() && self.tiers.pair.device.is_whole());
        for at in 0..LAYERS * EXPERTS {
            match self.tiers.locate(ExpertKey::from_index(at, EXPERTS)) {
                ExpertLocation::Device(slot) => assert_eq!(self.device[slot], Some(at)),
                ExpertLocation::Host(slot) => assert_eq!(self.host[slot], Some(at)),
                ExpertLocation::InFlight | ExpertLocation::Absent => {}
            }
            if let TierState::Resident(slot) = self.tiers.pair.host.state(at) {
                assert_eq!(self.host[slot], Some(at), "also a copy of an expert on the device");
            }
        }
        for row in (0..LAYERS).map(MoeRow) {
            let slot = |id| match self.tiers.locate(row.expert(id)) {
                ExpertLocation::Device(slot) => Some(slot),
                _ => None,
            };
            let all: Option<Vec<SlotIndex>> = (0..EXPERTS).map(slot).collect();
            assert_eq!(self.tiers.whole_row(row, None).map(|whole| whole.slots.to_vec()), all);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn bytes_are_where_the_ledger_says_and_wanted_experts_stay(
        steps in prop::collection::vec((0..9u8, 0..LAYERS, 0..EXPERTS, any::<bool>()), 100..400),
        (device, host, scratch, global) in (1usize..=EXPERTS, 0usize..5, 1usize..4, any::<bool>()),
        seed in any::<u16>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let mut machine = Machine::new(&TierShape::new(&geometry(), scope, device, host, scratch), seed.into());
        for (step, row, which, well) in steps {
            let before = machine.computable();
            match step {
                0 => machine.begin(MoeRow(row), which, 1 + row * 2),
                1 => machine.read(which),
                2 => {
                    if let Some(expert) = machine.pick(which) {
                        machine.promote(expert, PromoteFor::Demand);
                    }
                }
                3 if well => machine.promote(MoeRow(row).expert(which), PromoteFor::IdleLink),
                3 => {
                    machine.tiers.predict(&[MoeRow(row).expert(which), MoeRow(row).expert(row)]);
                    machine.promote(MoeRow(row).expert(which), PromoteFor::Prediction);
                }
                4 => machine.finish(which),
                5 => machine.prefetch(MoeRow(row).expert(which)),
                _ => machine.land(which, well || step > 6),
            }
            machine.check();
            if matches!(step, 1..=3 | 5) {
                let after = machine.computable();
                prop_assert!(before.iter().all(|e| after.contains(e)), "a wanted expert does not leave");
            }
        }
        while !machine.flights.is_empty() {
            machine.land(0, true);
        }
        while let Some(expert) = machine.pick(0) {
            machine.finish(0);
            prop_assert!(machine.tiers.locate(expert) != ExpertLocation::InFlight);
        }
        machine.check();
        for at in 0..LAYERS * EXPERTS {
            if let TierState::Resident(slot) = machine.tiers.pair.host.state(at) && machine.tiers.pair.host.is_scratch(slot) {
                prop_assert!(host == 0 && machine.tiers.unused_prefetches.contains(&at), "only an unused prefetch stays in a scratch slot");
            }
        }
    }
}
