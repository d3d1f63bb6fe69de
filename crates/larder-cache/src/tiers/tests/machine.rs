//! The state machine by itself, whoever drives it: what it may be told in any order, and what must hold all the time.

use proptest::prelude::*;

use super::*;

/// Something under way, and the bytes that it brings, as the number of the expert whose they are.
enum Flight {
    Read { row: usize, expert: usize, to: SlotIndex },
    In { row: usize, expert: usize, to: SlotIndex, bytes: usize },
    Out { demotion: Demotion, bytes: usize },
}

/// The tiers, what is in every slot, and what is under way.
struct World {
    tiers: Tiers,
    device: Vec<Option<usize>>,
    host: Vec<Option<usize>>,
    flights: Vec<Flight>,
    /// Of a layer, who is wanted.
    wanted: (usize, Vec<usize>),
}

impl World {
    fn new(setting: &TierSetting, seed: u64) -> Self {
        let policy: EvictionSpec = format!("random:seed={seed}").parse().unwrap();
        World {
            tiers: Tiers::new(setting, policy.make(&setting.policies(), &Help::default()).unwrap()),
            device: vec![None; setting.device.all_slots()],
            host: vec![None; setting.host.all_slots()],
            flights: Vec::new(),
            wanted: (0, Vec::new()),
        }
    }

    fn begin(&mut self, row: usize, first: usize, count: usize) {
        if self.wanted.1.is_empty() {
            let experts: Vec<usize> = (first..first + count).map(|e| e % EXPERTS).collect();
            self.tiers.begin(row, &experts, &[]);
            self.wanted = (row, experts);
        }
    }

    fn read(&mut self, which: usize) {
        let Some((row, expert)) = self.pick(which) else { return };
        if self.tiers.find(row, expert) == Whereabouts::Absent
            && let Some(to) = self.tiers.read(row, expert)
        {
            self.host[to] = None;
            self.flights.push(Flight::Read { row, expert, to });
        }
    }

    fn guess(&mut self, row: usize, expert: usize) {
        if let Some(to) = self.tiers.guess(row, expert) {
            self.host[to] = None;
            self.flights.push(Flight::Read { row, expert, to });
        }
    }

    fn promote(&mut self, row: usize, expert: usize, wish: Wish) {
        let Some(Promotion { from, to, demotion }) = self.tiers.promote(row, expert, wish) else { return };
        if let Some(demotion) = demotion {
            let bytes = self.device[to].expect("who is demoted was there");
            self.host[demotion.to] = None;
            self.flights.push(Flight::Out { demotion, bytes });
        }
        self.device[to] = None;
        let bytes = self.host[from].expect("who is promoted was there");
        self.flights.push(Flight::In { row, expert, to, bytes });
    }

    fn land(&mut self, which: usize, well: bool) {
        if self.flights.is_empty() {
            return;
        }
        match (self.flights.remove(which % self.flights.len()), well) {
            (Flight::Read { row, expert, to }, true) => {
                self.host[to] = Some(row * EXPERTS + expert);
                self.tiers.arrived(row, expert);
            }
            (Flight::Read { row, expert, .. }, false) => self.tiers.read_failed(row, expert),
            (Flight::In { row, expert, to, bytes }, true) => {
                self.device[to] = Some(bytes);
                self.tiers.promoted(row, expert);
            }
            (Flight::In { row, expert, .. }, false) => self.tiers.promotion_failed(row, expert),
            (Flight::Out { demotion: Demotion { row, expert, to }, bytes }, true) => {
                self.host[to] = Some(bytes);
                self.tiers.demoted(row, expert);
            }
            (Flight::Out { demotion: Demotion { row, expert, .. }, .. }, false) => {
                self.tiers.demotion_failed(row, expert);
            }
        }
    }

    fn finish(&mut self, which: usize) {
        let Some((row, expert)) = self.pick(which) else { return };
        if self.tiers.find(row, expert) != Whereabouts::Moving {
            self.tiers.done(row, expert);
            self.wanted.1.retain(|e| *e != expert);
        }
    }

    fn pick(&self, which: usize) -> Option<(usize, usize)> {
        let (row, wanted) = &self.wanted;
        Some((*row, *wanted.get(which % wanted.len().max(1))?))
    }

    /// Who is wanted and can be computed, which nothing but what fails or is done may change.
    fn computable(&self) -> Vec<usize> {
        let (row, wanted) = &self.wanted;
        let there = |e: &&usize| !matches!(self.tiers.find(*row, **e), Whereabouts::Absent);
        wanted.iter().filter(there).copied().collect()
    }

    fn check(&self) {
        assert!(self.tiers.shelves.host.is_whole() && self.tiers.shelves.device.is_whole());
        for at in 0..LAYERS * EXPERTS {
            match self.tiers.find(at / EXPERTS, at % EXPERTS) {
                Whereabouts::Device(slot) => assert_eq!(self.device[slot], Some(at)),
                Whereabouts::Host(slot) => assert_eq!(self.host[slot], Some(at)),
                Whereabouts::Moving | Whereabouts::Absent => {}
            }
            if let Place::There(slot) = self.tiers.shelves.host.place(at) {
                assert_eq!(self.host[slot], Some(at), "also as a copy of what is on the device");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn bytes_are_where_they_are_said_to_be_and_the_wanted_stay(
        steps in prop::collection::vec((0..9u8, 0..LAYERS, 0..EXPERTS, any::<bool>()), 100..400),
        (device, host, passing, global) in (1usize..5, 0usize..5, 1usize..4, any::<bool>()),
        seed in any::<u16>(),
    ) {
        let scope = if global { CacheScope::Global } else { CacheScope::Layer };
        let mut world = World::new(&TierSetting::new(&geometry(), scope, device, host, passing), seed.into());
        for (step, row, which, well) in steps {
            let before = world.computable();
            match step {
                0 => world.begin(row, which, 1 + row * 2),
                1 => world.read(which),
                2 => {
                    if let Some((row, expert)) = world.pick(which) {
                        world.promote(row, expert, Wish::Wanted);
                    }
                }
                3 => world.promote(row, which, Wish::Idle),
                4 => world.finish(which),
                5 => world.guess(row, which),
                _ => world.land(which, well || step > 6),
            }
            world.check();
            if matches!(step, 1..=3 | 5) {
                let after = world.computable();
                prop_assert!(before.iter().all(|e| after.contains(e)), "who is wanted does not leave");
            }
        }
        while !world.flights.is_empty() {
            world.land(0, true);
        }
        while let Some((row, expert)) = world.pick(0) {
            world.finish(0);
            prop_assert!(world.tiers.find(row, expert) != Whereabouts::Moving);
        }
        world.check();
        for at in 0..LAYERS * EXPERTS {
            if let Place::There(slot) = world.tiers.shelves.host.place(at) && world.tiers.shelves.host.is_passing(slot) {
                prop_assert!(host == 0 && world.tiers.strays.contains(&at), "only a guess stays where things pass through");
            }
        }
    }
}
