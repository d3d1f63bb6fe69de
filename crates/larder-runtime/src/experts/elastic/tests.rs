//! Tests of slots that follow the memory: what they have taken of the budget.

use std::sync::Arc;

use larder_cache::{Cache, CacheScope, Shards, SlotSupply};
use larder_core::{CallerThread, ExpertId, ExpertLayout, Geometry, NumberFormat};
use larder_engine::Routing;
use larder_model::ComputeContext;
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_store::StoreError;
use larder_store::reader::MemoryReader;

use super::*;

const SLOT: u64 = 4096;
const MOST: usize = 8;

/// Shards that are not read.
struct NoShards(ExpertLayout);

impl Shards for NoShards {
    fn layout(&self, _: LayerIdx) -> &ExpertLayout {
        &self.0
    }

    fn data_start(&self) -> u64 {
        SLOT
    }

    fn check(&self, _: LayerIdx, _: ExpertId, _: usize, _: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Slots of one layer of `MOST` experts, all in use, and two scratch slots; the first `refused` releases fail.
fn slots(refused: usize) -> (ElasticSlots, StreamingPath, MemoryBudget) {
    let geometry = Geometry::narrow(1, 0..1, MOST, 2);
    let shape = CacheShape { scratch: 2, ..CacheShape::new(&geometry, MOST, CacheScope::Layer) };
    let (arena, memory) = Arena::new(shape.total_slots(), SLOT as usize).unwrap();
    let reader = Box::new(MemoryReader::new(Arc::default(), 1).refusing_releases(refused));
    let layout = ExpertLayout::new(8, 8, [NumberFormat::F32; 3], false).unwrap();
    let supply = SlotSupply { memory, reader, shards: Box::new(NoShards(layout)), threads: Arc::new(CallerThread) };
    let lru = "lru".parse::<EvictionSpec>().unwrap().make(&shape, &PolicyInputs::default()).unwrap();
    let compute = Arc::new(ComputeContext::new(1, false).unwrap());
    let mut path = StreamingPath::new(Routing::default(), Cache::new(&geometry, &shape, lru, supply), compute, 0);
    let plan = ElasticPlan {
        slots: MOST,
        least: 2,
        most: MOST,
        scope: CacheScope::Layer,
        pass_through: 0,
        slot_bytes: SLOT,
        fixed_bytes: 0,
        scratch_bytes: 2 * SLOT,
        reserve: 0,
    };
    let budget = MemoryBudget::new(10 * SLOT);
    let elastic = ElasticSlots::new(plan, &mut path, arena, LayerIdx(0), &budget).unwrap();
    (elastic, path, budget)
}

/// Changes the number of slots and returns how many the budget has.
fn taken((elastic, path, budget): &mut (ElasticSlots, StreamingPath, MemoryBudget), to: usize) -> u64 {
    let before = path.capacity();
    if to > before {
        elastic.grow(before, to, path)
    } else {
        elastic.shrink(to, path)
    }
    budget.taken_bytes() / SLOT
}

#[test]
fn the_budget_has_the_slots_in_use_and_the_scratch_slots() {
    let mut slots = slots(0);
    assert_eq!([3, 6, 8, 2].map(|to| taken(&mut slots, to)), [5, 8, 10, 4]);
}

#[test]
fn the_budget_has_what_could_not_be_given_back() {
    let mut slots = slots(7);
    assert_eq!(taken(&mut slots, 3), 10, "five slots were kept");
    assert_eq!(taken(&mut slots, 6), 8, "two are refused again, and then used again");
    assert_eq!(taken(&mut slots, 8), 10);
    assert_eq!(slots.1.kept_bytes(), 0);
}

#[test]
fn slots_that_are_added_are_touched_ahead_and_those_given_back_are_not() {
    let mut slots = slots(0);
    taken(&mut slots, 3);
    assert_eq!(slots.0.arena.touched().bytes, 0);
    taken(&mut slots, 6);
    let all = slots.0.arena.bytes() as u64;
    let end = Instant::now() + Duration::from_secs(60);
    while slots.0.arena.touch().is_ok() && slots.0.arena.touched().bytes < all {
        assert!(Instant::now() < end, "{:?}", slots.0.arena.touched());
    }
    let in_use = slots.1.memory_in_use();
    assert_eq!(in_use.iter().filter(|in_use| **in_use).count(), 8, "six slots and two scratch slots");
}
