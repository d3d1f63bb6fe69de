//! The memory plan of slots whose number follows the available memory: how many at the start, at least and at most.

use anyhow::{Result, bail};
use larder_cache::{CacheScope, pass_through_slots};
use larder_policy::eviction::CacheShape;

use super::{PlanInputs, no_slot, slots_text};
use crate::notices::Setting;
use crate::options::Options;

/// Slots whose number changes. Numbers are per layer or, in global scope, in total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ElasticPlan {
    /// Slots at the start.
    pub slots: usize,
    /// The fewest slots: those that one token uses.
    pub least: usize,
    /// The most slots: those for all experts, or those that would fit if no other program used memory.
    pub most: usize,
    /// What shares the slots.
    pub scope: CacheScope,
    /// Pass-through slots beside any number of slots.
    pub pass_through: usize,
    /// Bytes of one slot more: of one per layer or, in global scope, of one.
    pub slot_bytes: u64,
    /// Bytes of the pass-through slots.
    pub fixed_bytes: u64,
    /// Bytes of the scratch slots, which [`MemoryPlan::parts`](super::MemoryPlan::parts) adds itself.
    pub scratch_bytes: u64,
    /// Bytes of memory that stay unused.
    pub reserve: u64,
}

impl ElasticPlan {
    /// Bytes of experts with this number of slots, without scratch slots.
    pub fn bytes_of(&self, slots: usize) -> u64 {
        self.fixed_bytes + slots as u64 * self.slot_bytes
    }

    /// Bytes to take of the budget for this number of slots and `kept` bytes of others, which could not be given back.
    pub fn leased_bytes(&self, slots: usize, kept: u64) -> u64 {
        self.bytes_of(slots) + self.scratch_bytes + kept
    }

    /// The slots, as text.
    pub(super) fn describe(&self, inputs: &PlanInputs) -> String {
        let ElasticPlan { slots, most, scope, pass_through, .. } = *self;
        let now = slots_text(inputs, slots, pass_through, scope);
        let division = if scope == CacheScope::Layer { " per layer" } else { " in all" };
        format!("{now}; at most {most}{division}, as memory becomes available")
    }
}

/// Pass-through slots of a cache that may have fewer slots than this shape: as many as with a slot less than there are
/// experts.
fn elastic_pass_through(shape: &CacheShape) -> usize {
    pass_through_slots(&CacheShape { slots: shape.slots.min(shape.keys_per_pool().saturating_sub(1)), ..*shape })
}

/// Decides the plan.
pub(super) fn decide(inputs: &PlanInputs, options: &Options) -> Result<ElasticPlan> {
    let (scope, geometry) = (options.cache.scope, &inputs.blueprint.geometry);
    let (Some(budget), Some(limit)) = (inputs.slot_budget(), inputs.limit_bytes) else {
        bail!("the available memory is not known here; use {} with a size", Setting::Cache)
    };
    let all = inputs.slots_for(geometry.experts, scope);
    let pass_through = elastic_pass_through(&CacheShape::new(geometry, all, scope));
    let fixed = pass_through as u64 * inputs.expert_sizes.largest();
    let each = inputs.slot_bytes(scope);
    let fit = |bytes: u64| (bytes.saturating_sub(fixed) / each.max(1)).min(all as u64) as usize;
    let slots = fit(budget);
    if slots == 0 {
        bail!("{}", no_slot(inputs, options, scope));
    }
    let reserve = inputs.reserve_bytes();
    let most = fit(limit.saturating_sub(inputs.base_bytes().saturating_add(reserve))).max(slots);
    let least = inputs.slots_for(geometry.top_k, scope).min(slots);
    let scratch_bytes = inputs.scratch_slots as u64 * inputs.expert_sizes.largest();
    let (slot_bytes, fixed_bytes) = (each, fixed);
    Ok(ElasticPlan { slots, least, most, scope, pass_through, slot_bytes, fixed_bytes, scratch_bytes, reserve })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CacheSize;
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, inputs, options};
    use crate::plan::{MemoryPlan, decide};

    fn elastic(available: u64, limit: u64, scope: CacheScope) -> MemoryPlan {
        let blueprint = blueprint();
        let inputs = PlanInputs { limit_bytes: Some(limit), ..inputs(&blueprint, Some(available)) };
        decide(&inputs, &options(CacheSize::Auto, scope)).unwrap()
    }

    fn numbers(plan: MemoryPlan) -> (usize, usize, usize) {
        match plan {
            MemoryPlan::Elastic(plan) => (plan.slots, plan.least, plan.most),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_available_memory_is_the_start_and_the_machine_the_ceiling() {
        let tight = beside_reserve(12 * MEGA);
        let of = |limit, scope| numbers(elastic(tight, limit, scope));
        assert_eq!(of(1 << 40, CacheScope::Layer), (2, 2, 8), "all experts at most");
        assert_eq!(of(tight, CacheScope::Layer), (2, 2, 2));
        assert_eq!(of(1 << 40, CacheScope::Global), (8, 8, 32));
        assert_eq!(of(tight + 8 * MEGA, CacheScope::Layer), (2, 2, 3));
        // All experts fit now, and still others may pass through later.
        let plan = elastic(1 << 40, 1 << 40, CacheScope::Layer);
        assert_eq!(numbers(plan), (8, 2, 8));
        assert_eq!(plan.slots(), Some((8, CacheScope::Layer)));
    }

    #[test]
    fn the_printed_ceiling_is_that_of_the_most_slots() {
        let blueprint = blueprint();
        let inputs = PlanInputs { limit_bytes: Some(1 << 40), ..inputs(&blueprint, Some(beside_reserve(12 * MEGA))) };
        let plan = decide(&inputs, &options(CacheSize::Auto, CacheScope::Layer)).unwrap();
        assert_eq!(plan.expert_bytes(&inputs), 33 * MEGA);
        let text = plan.describe(&inputs);
        assert!(text.starts_with("plan: at most "), "{text}");
        assert!(text.contains("2 per layer) + 1 pass-through slot; at most 8 per layer"), "{text}");
        let json = plan.json(&inputs);
        assert_eq!([&json["slots"], &json["least_slots"], &json["most_slots"]], [2, 2, 8]);
    }

    #[test]
    fn scratch_slots_are_counted_once() {
        let blueprint = blueprint();
        let of = |scratch_slots| {
            let available = Some(beside_reserve(16 * MEGA));
            let inputs = PlanInputs { limit_bytes: Some(1 << 40), scratch_slots, ..inputs(&blueprint, available) };
            let plan = decide(&inputs, &options(CacheSize::Auto, CacheScope::Layer)).unwrap();
            let MemoryPlan::Elastic(elastic) = plan else { panic!("{plan:?}") };
            let parts = plan.parts(&inputs);
            let experts = parts.iter().find(|(part, _)| *part == crate::machine::budget::MemoryUse::Experts).unwrap().1;
            assert_eq!(experts, elastic.bytes_of(elastic.most) + elastic.scratch_bytes);
            elastic.scratch_bytes
        };
        assert_eq!([of(0), of(3)], [0, 3 * MEGA]);
    }

    #[test]
    fn lossy_routing_has_a_fixed_number() {
        let blueprint = blueprint();
        let inputs = PlanInputs { limit_bytes: Some(1 << 40), ..inputs(&blueprint, Some(beside_reserve(12 * MEGA))) };
        let mut options = options(CacheSize::Auto, CacheScope::Layer);
        options.routing = "prior:lambda=0.2".parse().unwrap();
        assert_eq!(decide(&inputs, &options).unwrap(), MemoryPlan::Slots { slots: 2, scope: CacheScope::Layer });
        let unknown = PlanInputs { limit_bytes: None, available_bytes: None, ..inputs };
        let refused = decide(&unknown, &super::super::tests::options(CacheSize::Auto, CacheScope::Layer)).unwrap_err();
        assert!(refused.to_string().contains("use --cache with a size"), "{refused}");
    }
}
