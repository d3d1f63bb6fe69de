//! Tests of the cache of two tiers, with fakes of the reader and the device.

mod ahead;
mod faults;
mod machine;
mod naive;
mod order;
mod prefetch;
mod victims;

use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, LayerIdx, MoeRow, WantedExpert};
use larder_policy::eviction::{EvictionSpec, POLICIES, PolicyInputs};
use larder_store::reader::{Arena, MemoryReader};

use super::*;
use crate::expert_cache::ExpertCache;
use crate::testing::{EXPERTS, LAYERS, fill_byte, geometry, layout, numbered_reader, supply};

const SLOT: usize = 12288;
const ROOMY: u64 = 1 << 30;

/// Copies cost nothing, so the device computes.
const COPY: MeasuredCosts = MeasuredCosts { copy: 0.0, host: 1.0, device: 0.0 };
/// The CPU costs nothing, so it computes.
const HOST: MeasuredCosts = MeasuredCosts { copy: 1.0, host: 0.0, device: 1.0 };

fn shape(scope: CacheScope, device: usize, host: usize) -> TierShape {
    TierShape::new(&geometry(), scope, device, host, 2)
}

/// A cache with fakes, and access to the slots of its device.
struct Fixture {
    cache: TieredCache,
    slots: DeviceSlots,
    /// The reported time of computing on the CPU and on the device.
    takes: [Option<Duration>; 2],
}

impl Fixture {
    fn new(shape: &TierShape, measured: MeasuredCosts) -> Self {
        Fixture::with(shape, measured, "lru", |m| m, |d| d).unwrap()
    }

    fn with<D: Device + 'static>(
        shape: &TierShape,
        measured: MeasuredCosts,
        policy: &str,
        prepare: impl FnOnce(MemoryReader) -> MemoryReader,
        equip: impl FnOnce(FakeDevice) -> D,
    ) -> Result<Self, DeviceError> {
        let reader = prepare(numbered_reader());
        let (_, memory) = Arena::new(shape.host.total_slots(), SLOT).unwrap();
        let device = FakeDevice::new(ROOMY, 11);
        let slots = device.slots();
        let device = equip(device);
        let policies =
            policy.parse::<EvictionSpec>().unwrap().make(&shape.policy_shape(), &PolicyInputs::default()).unwrap();
        let host = supply(memory, reader);
        let cache = TieredCache::new(&geometry(), shape, policies, host, Box::new(device), measured)?;
        Ok(Fixture { cache, slots, takes: [None; 2] })
    }

    /// Visits experts and checks that each was computed once from its own bytes, and the state afterwards.
    fn visit(&mut self, layer: u16, wanted: &[u16], tokens: usize) -> Result<(), TierError> {
        let layer = LayerIdx(layer);
        let wanted: Vec<WantedExpert> = wanted.iter().map(|e| WantedExpert { expert: ExpertId(*e), tokens }).collect();
        let mut checker = CheckingCompute { layer, slots: &self.slots, computed: Vec::new(), takes: self.takes };
        let outcome = self.cache.visit(layer, &wanted, &[], &mut checker);
        let mut computed = checker.computed;
        let total = computed.len();
        computed.sort();
        computed.dedup();
        assert_eq!(computed.len(), total, "each expert once");
        assert!(computed.iter().all(|e| wanted.iter().any(|w| w.expert == *e)), "only wanted experts");
        assert!(outcome.is_err() || total == wanted.len(), "all wanted experts");
        let moves = |w: &WantedExpert| {
            self.cache.residency().presence(self.cache.row(layer).key(w.expert)) == Presence::InFlight
        };
        assert!(outcome.is_ok() || !wanted.iter().any(moves), "an error leaves nothing in flight");
        self.check();
        outcome
    }

    fn hint(&mut self, layer: u16, experts: &[u16], most: usize) {
        let experts: Vec<ExpertId> = experts.iter().map(|e| ExpertId(*e)).collect();
        self.cache.hint(LayerIdx(layer), &experts, most);
    }

    /// Checks that no slot is lost or held twice, and that resident experts have their own bytes.
    fn check(&self) {
        let links = &self.cache.links;
        let pair = &links.tiers.pair;
        assert!(links.is_whole() && pair.host.is_whole() && pair.device.is_whole());
        assert!(pair.pinned.iter().all(|pinned| !pinned), "no expert is pinned");
        for at in 0..LAYERS * EXPERTS {
            let row = pair.expert(at).row;
            let right = |data: &[u8]| data.iter().all(|b| *b == at as u8 + 1);
            if let TierState::Resident(slot) = pair.host.state(at) {
                assert!(right(links.filler.data(row, slot)), "wrong bytes in memory");
                let unused = !links.tiers.has_host_cache() && links.tiers.unused_prefetches.contains(&at);
                assert!(!pair.host.is_scratch(slot) || unused, "only an unused prefetch stays in a scratch slot");
            }
            if let TierState::Resident(slot) = pair.device.state(at) {
                assert!(right(&self.slots.bytes(slot)[..layout().bytes]), "wrong bytes on the device");
            }
        }
    }

    fn traffic(&self) -> TierTraffic {
        self.cache.traffic()
    }

    fn is_on_device(&self, row: usize, expert: usize) -> bool {
        matches!(self.cache.links.tiers.locate(MoeRow(row).expert(expert)), ExpertLocation::Device(_))
    }

    fn is_in_memory(&self, row: usize, expert: usize) -> bool {
        let pair = &self.cache.links.tiers.pair;
        pair.host.is_resident(pair.index(MoeRow(row).expert(expert)))
    }
}

/// Computes nothing, but checks every byte.
struct CheckingCompute<'a> {
    layer: LayerIdx,
    slots: &'a DeviceSlots,
    computed: Vec<ExpertId>,
    takes: [Option<Duration>; 2],
}

impl CheckingCompute<'_> {
    fn see(&mut self, expert: ExpertId, data: &[u8]) {
        assert!(data.iter().all(|b| *b == fill_byte(self.layer, expert)), "wrong bytes for {expert} of {}", self.layer);
        self.computed.push(expert);
    }
}

impl TieredCompute for CheckingCompute<'_> {
    fn host(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration> {
        assert!(experts.iter().all(|(_, data)| data.len() == layout.bytes));
        experts.iter().for_each(|(expert, data)| self.see(*expert, data));
        self.takes[0]
    }

    fn device(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration> {
        for (expert, slot) in experts {
            let data = self.slots.bytes(*slot);
            self.see(*expert, &data[..layout.bytes]);
        }
        self.takes[1]
    }
}

#[test]
fn an_arena_that_does_not_fit_is_refused_with_the_numbers() {
    let small = |_| FakeDevice::new(5 * SLOT as u64, 1);
    let error = Fixture::with(&shape(CacheScope::Layer, 2, 2), COPY, "lru", |m| m, small).err().unwrap();
    let (slots, slot_bytes) = (2 * LAYERS, SLOT);
    assert_eq!(error, DeviceError::OutOfMemory { slots, slot_bytes, free_bytes: 5 * SLOT as u64 });
}

#[test]
fn an_expert_that_leaves_the_device_stays_in_memory_while_there_are_slots() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 2), COPY);
    for expert in 0..3 {
        fixture.visit(0, &[expert], 1).unwrap();
    }
    assert!(!fixture.is_on_device(0, 0) && fixture.is_in_memory(0, 0));
    assert_eq!(fixture.traffic().counts.free_demotions, 1, "it had never left memory");
    fixture.visit(0, &[3], 1).unwrap();
    assert!(!fixture.is_on_device(0, 1) && fixture.is_in_memory(0, 1));
    let there =
        |fixture: &Fixture| (0..EXPERTS).filter(|e| fixture.is_on_device(0, *e) || fixture.is_in_memory(0, *e)).count();
    assert_eq!(there(&fixture), 4, "both tiers together are full");
    fixture.visit(0, &[0], 1).unwrap();
    let counts = fixture.traffic().counts;
    assert_eq!((counts.misses, counts.host_hits), (4, 1));
    fixture.visit(0, &[4], 1).unwrap();
    fixture.visit(0, &[5], 1).unwrap();
    assert_eq!(there(&fixture), 4);
    assert!(fixture.traffic().counts.demotions > 0 && fixture.traffic().from_device_bytes > 0);
    assert!(!fixture.is_in_memory(0, 1), "the least recently used expert has left both tiers");
}

#[test]
fn without_host_slots_experts_pass_through_scratch_slots() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 3, 0), HOST);
    for round in 0..20u16 {
        fixture.visit(round % 3, &[round % 6, (round + 1) % 6, (round + 3) % 6, (round + 4) % 6], 1).unwrap();
        assert!((0..LAYERS * EXPERTS).all(|at| !fixture.is_in_memory(at / EXPERTS, at % EXPERTS)));
    }
    let TierTraffic { counts, on_host, on_device, demand_bytes, to_device_bytes, from_device_bytes, .. } =
        fixture.traffic();
    assert_eq!(
        (counts.host_hits, counts.demotions, counts.free_demotions, on_host, on_device, from_device_bytes),
        (0, 0, 0, 0, 80, 0)
    );
    assert_eq!(demand_bytes, to_device_bytes);
    assert!(counts.device_hits > 0 && counts.misses > 0);
}

#[test]
fn where_a_copy_takes_longer_the_cpu_computes_and_the_best_follows_in_the_background() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 4), HOST);
    fixture.visit(0, &[0, 1], 1).unwrap();
    assert_eq!((fixture.traffic().on_host, fixture.traffic().on_device), (2, 0));
    assert_eq!(fixture.traffic().counts.promotions, 1, "one at a time");
    fixture.visit(0, &[1, 0], 1).unwrap();
    let traffic = fixture.traffic();
    assert_eq!((traffic.on_host, traffic.on_device), (3, 1), "the best of the first two was in flight");
    assert_eq!(traffic.counts.in_flight_hits, 1);
    assert!(fixture.is_on_device(0, 0));
    assert!(fixture.is_in_memory(0, 0), "its host slot was not needed");
}

#[test]
fn one_copy_at_a_time_is_made_in_the_background() {
    let mut fixture = Fixture::new(&shape(CacheScope::Layer, 2, 4), HOST);
    fixture.visit(0, &[0, 1, 2, 3], 1).unwrap();
    for expert in 1..4 {
        fixture.visit(0, &[expert], 1).unwrap();
    }
    let traffic = fixture.traffic();
    assert_eq!((traffic.on_host, traffic.counts.promotions), (7, 1), "no visit waited for the first");
    fixture.visit(1, &[0], 1).unwrap();
    fixture.visit(0, &[3], 1).unwrap();
    assert_eq!(fixture.traffic().counts.promotions, 2);
}

#[test]
fn the_cost_of_copies_is_learned() {
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 1, 1), COPY, "lru", |m| m, |d| d.link(1e-9)).unwrap();
    assert_eq!(fixture.cache.costs().copy_s(1000), 0.0);
    (0..40u16).for_each(|i| fixture.visit(0, &[i % 6], 1).unwrap());
    assert!((fixture.cache.costs().copy_s(1000) - 1e-6).abs() < 1e-8);
    let TierTraffic { to_device_bytes, to_device_busy, from_device_bytes, from_device_busy, .. } = fixture.traffic();
    for (bytes, busy) in [(to_device_bytes, to_device_busy), (from_device_bytes, from_device_busy)] {
        assert!(bytes > 0 && (busy.as_secs_f64() / (bytes as f64 * 1e-9) - 1.0).abs() < 1e-3);
    }
}

#[test]
fn while_all_are_in_memory_promotions_go_on_without_waiting() {
    let measured = MeasuredCosts { copy: 4e-9, host: 1e-9, device: 1e-10 };
    let equip = |d: FakeDevice| d.polled(1).link(2e-9);
    let mut fixture = Fixture::with(&shape(CacheScope::Layer, 2, 4), measured, "lru", |m| m, equip).unwrap();
    (0..4).for_each(|expert| fixture.visit(0, &[expert], 1).unwrap());
    let before = fixture.traffic();
    (0..200u16).for_each(|i| fixture.visit(0, &[i % 4], 1).unwrap());
    let TierTraffic { counts, on_host, waited, .. } = fixture.traffic() - before;
    assert_eq!((counts.host_hits + counts.device_hits, on_host + counts.device_hits), (200, 200));
    assert!(waited.is_zero() && counts.promotions > 100, "{counts:?}");
    assert!(fixture.cache.links.queued_bytes() <= SLOT, "completed copies are not queued");
    assert!((fixture.cache.costs().copy_s(1000) / 2e-6 - 1.0).abs() < 0.01);
}

#[test]
fn a_far_too_high_first_estimate_is_corrected_in_bounded_time() {
    let truly = MeasuredCosts { copy: 1e-8, host: 2e-8, device: 1e-9 };
    let took = |per_byte: f64| Some(Duration::from_secs_f64(per_byte * SLOT as f64));
    for dear in [MeasuredCosts { copy: 1e-7, ..truly }, MeasuredCosts { host: 2e-7, ..truly }] {
        let equip = |d: FakeDevice| d.link(truly.copy);
        let mut fixture = Fixture::with(&shape(CacheScope::Layer, 1, 5), dear, "lru", |m| m, equip).unwrap();
        fixture.takes = [took(truly.host), took(truly.device)];
        (0..64 * 40u16).for_each(|i| fixture.visit(0, &[i % 5], 1).unwrap());
        let (copy, host) = (fixture.cache.costs().copy_s(1), fixture.cache.costs().compute_s(Side::Host, 1, 1));
        let right = |found: f64, truly: f64| (found / truly - 1.0).abs() < 0.1;
        assert!(right(copy, truly.copy) && right(host, truly.host), "{copy} {host}");
    }
}

#[test]
fn measured_costs_decide_the_side_that_computes() {
    let mut fixture = Fixture::with(
        &shape(CacheScope::Global, 2, 9),
        MeasuredCosts { copy: 1e-9, host: 1e-10, device: 1e-12 },
        "lru",
        |m| m,
        |d| d.link(1e-9),
    )
    .unwrap();
    let round = |fixture: &mut Fixture| {
        let before = fixture.traffic();
        (0..12u16).for_each(|i| fixture.visit(i % 3, &[i % 6, (i + 1) % 6], 1).unwrap());
        (fixture.traffic().on_host - before.on_host, fixture.traffic().on_device - before.on_device)
    };
    let (host, device) = round(&mut fixture);
    assert!(host > 2 * device, "{host} {device}");
    fixture.takes[0] = Some(Duration::from_millis(1));
    round(&mut fixture);
    let (host, device) = round(&mut fixture);
    assert!(device > 2 * host, "the CPU turned out to be slow: {host} {device}");
}

#[test]
fn every_policy_ranks_both_tiers() {
    for policy in POLICIES.iter().map(|p| p.name).filter(|name| !["belady", "learned"].contains(name)) {
        for scope in [CacheScope::Layer, CacheScope::Global] {
            for measured in [COPY, HOST] {
                let shape = shape(scope, 2, 2);
                let mut fixture =
                    Fixture::with(&shape, measured, policy, |m| m.overtaken(3), |d| d.overtaken(3).polled(2)).unwrap();
                for i in 0..90u16 {
                    let wanted: Vec<u16> = (0..=i % 5).map(|j| (i * i / 7 + j) % 6).collect();
                    fixture.visit(i % 3, &wanted, 1).unwrap_or_else(|e| panic!("{policy}: {e}"));
                }
                let TierTraffic { counts, demand_bytes, .. } = fixture.traffic();
                assert_eq!(demand_bytes, counts.misses * SLOT as u64, "{policy}: each is read once");
                assert!(counts.evictions > 0 && counts.device_hits + counts.host_hits > 0, "{policy} {counts:?}");
            }
        }
    }
}

#[test]
fn policies_change_and_no_expert_is_lost() {
    let shape = shape(CacheScope::Global, 3, 4);
    let mut fixture = Fixture::new(&shape, COPY);
    let round =
        |fixture: &mut Fixture| (0..30u16).for_each(|i| fixture.visit(i % 3, &[i % 6, (i + 2) % 6], 1).unwrap());
    round(&mut fixture);
    let there = |fixture: &Fixture| -> Vec<ExpertLocation> {
        (0..LAYERS * EXPERTS).map(|at| fixture.cache.links.tiers.locate(ExpertKey::from_index(at, EXPERTS))).collect()
    };
    let before = there(&fixture);
    let arc = "arc".parse::<EvictionSpec>().unwrap().make(&shape.policy_shape(), &PolicyInputs::default()).unwrap();
    fixture.cache.set_policies(arc);
    assert_eq!(there(&fixture), before);
    round(&mut fixture);
}
