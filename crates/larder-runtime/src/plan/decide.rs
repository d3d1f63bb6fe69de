//! Decides how many experts stay in memory, and says why none can.

use anyhow::{Result, bail};
use larder_cache::CacheScope;
use larder_core::{format_bytes, size_up};

use super::{MemoryPlan, PlanInputs, elastic};
use crate::notices::Setting;
use crate::options::{CacheSize, Options};

/// Decides the plan, from the requested size of the cache and the available memory.
pub fn decide(inputs: &PlanInputs, options: &Options) -> Result<MemoryPlan> {
    let scope = options.cache.scope;
    // A text under lossy routing depends on the number of slots.
    if options.cache.size == CacheSize::Auto && options.routing.is_lossless() {
        return elastic::decide(inputs, options).map(MemoryPlan::Elastic);
    }
    let slots = match (requested_slots(inputs, options), inputs.slot_budget()) {
        (Some(slots), _) => slots,
        (None, Some(budget)) if budget < inputs.all_expert_bytes() => inputs.slots_in(budget, scope),
        (None, _) => return Ok(MemoryPlan::AllResident),
    };
    if slots == 0 {
        bail!("{}", no_slot(inputs, options, scope));
    }
    check_fits(inputs, slots, scope)?;
    Ok(MemoryPlan::Slots { slots, scope })
}

/// Why there is not one slot, and what would be enough.
pub(super) fn no_slot(inputs: &PlanInputs, options: &Options, scope: CacheScope) -> String {
    let least = inputs.bytes_of_slots(1, scope);
    let what = match scope {
        CacheScope::Layer => "one expert per layer",
        CacheScope::Global => "one expert",
    };
    match options.cache.size {
        CacheSize::Bytes(size) => format!(
            "{} {} is too small: at least {} is needed ({what})",
            Setting::Cache,
            format_bytes(size),
            size_up(least)
        ),
        _ => format!(
            "not enough memory: {} available, and {what} needs {} beside {}; try a shorter {}",
            format_bytes(inputs.available_bytes.unwrap_or_default()),
            format_bytes(least),
            inputs.other_uses(),
            Setting::Context
        ),
    }
}

/// The number of slots that the options request, if they do.
pub(super) fn requested_slots(inputs: &PlanInputs, options: &Options) -> Option<usize> {
    let scope = options.cache.scope;
    match options.cache.size {
        CacheSize::Available | CacheSize::Auto | CacheSize::All => None,
        CacheSize::ExpertsPerLayer(per_layer) => Some(inputs.slots_for(per_layer, scope)),
        CacheSize::Bytes(bytes) => Some(inputs.slots_in(bytes, scope)),
    }
}

pub(super) fn check_fits(inputs: &PlanInputs, slots: usize, scope: CacheScope) -> Result<()> {
    let Some(budget) = inputs.slot_budget() else { return Ok(()) };
    let need = inputs.bytes_of_slots(slots, scope);
    if need <= budget {
        return Ok(());
    }
    let fits = inputs.slots_in(budget, scope);
    let nearest = match inputs.per_layer(fits, scope) {
        0 => format!("not even one expert per layer fits; try a shorter {}", Setting::Context),
        n => format!("{} {n}x fits", Setting::Cache),
    };
    bail!(
        "{} of cached experts do not fit beside {} into the {} of available memory; {nearest}",
        format_bytes(need),
        inputs.other_uses(),
        format_bytes(inputs.available_bytes.unwrap_or_default()),
    )
}
