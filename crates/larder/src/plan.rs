//! How much of a model stays in memory, decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::{Scope, slot_count};
use larder_core::Geometry;

use crate::cli::CacheFlags;
use crate::print;

/// Left for the context, activations and everything else that is not weights.
const SPARE_BYTES: u64 = 256 << 20;

/// What a plan is made from.
pub struct Facts<'a> {
    /// The model's sizes.
    pub geometry: &'a Geometry,
    /// Bytes of the resident weights.
    pub resident: u64,
    /// Bytes of the largest expert.
    pub slot: u64,
    /// Bytes of memory that can be used, where the system tells.
    pub available: Option<u64>,
}

/// Where the experts are while the model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// All in memory.
    AllResident,
    /// On disk, passing through slots: so many per layer or, in global scope, in all.
    Slots {
        /// The number.
        slots: usize,
        /// What it counts.
        scope: Scope,
    },
}

impl Facts<'_> {
    fn all_experts(&self) -> u64 {
        self.geometry.expert_count() as u64 * self.slot
    }

    /// Bytes for slots beside everything else.
    fn room(&self) -> Option<u64> {
        Some(self.available?.saturating_sub(self.resident + SPARE_BYTES))
    }

    /// Slots per layer, or in all, that fit into `bytes`.
    fn slots_in(&self, bytes: u64, scope: Scope) -> usize {
        let total = bytes / self.slot.max(1);
        let layers = self.geometry.moe_layers.len().max(1) as u64;
        match scope {
            Scope::Layer => (total / layers).min(self.geometry.experts as u64) as usize,
            Scope::Global => total.min(self.geometry.expert_count() as u64) as usize,
        }
    }

    fn bytes_of(&self, slots: usize, scope: Scope) -> u64 {
        slot_count(self.geometry, slots, scope) as u64 * self.slot
    }
}

/// Decides by what was asked for and what there is.
pub fn decide(facts: &Facts, flags: &CacheFlags) -> Result<Plan> {
    let scope = flags.cache_scope.into();
    let layers = facts.geometry.moe_layers.len();
    let asked = match (flags.cache_experts, flags.cache_mem) {
        (Some(per_layer), _) => Some(match scope {
            Scope::Layer => per_layer.min(facts.geometry.experts),
            Scope::Global => per_layer.saturating_mul(layers).min(facts.geometry.expert_count()),
        }),
        (None, Some(bytes)) => Some(facts.slots_in(bytes.0, scope)),
        (None, None) => None,
    };
    let slots = match (asked, facts.room()) {
        (Some(slots), _) => slots,
        (None, Some(room)) if room < facts.all_experts() => facts.slots_in(room, scope),
        (None, _) => return Ok(Plan::AllResident),
    };
    if slots == 0 {
        let least = print::bytes(facts.bytes_of(1, scope));
        bail!("not even one slot fits: that takes {least} for experts beside {}", beside(facts));
    }
    check_fits(facts, slots, scope)?;
    Ok(Plan::Slots { slots, scope })
}

fn beside(facts: &Facts) -> String {
    format!("{} of resident weights and {} to spare", print::bytes(facts.resident), print::bytes(SPARE_BYTES))
}

fn check_fits(facts: &Facts, slots: usize, scope: Scope) -> Result<()> {
    let Some(room) = facts.room() else { return Ok(()) };
    let need = facts.bytes_of(slots, scope);
    if need <= room {
        return Ok(());
    }
    let fits = facts.slots_in(room, scope);
    let per_layer = match scope {
        Scope::Layer => fits,
        Scope::Global => fits / facts.geometry.moe_layers.len().max(1),
    };
    bail!(
        "{} of slots do not fit beside {} into the {} that are available; --cache-experts {per_layer} would",
        print::bytes(need),
        beside(facts),
        print::bytes(facts.available.unwrap_or_default()),
    )
}

impl Plan {
    /// One line for a person.
    pub fn sentence(&self, facts: &Facts) -> String {
        let all = facts.geometry.expert_count();
        let resident = print::bytes(facts.resident);
        match *self {
            Plan::AllResident => {
                let experts = print::bytes(facts.all_experts());
                format!("plan: {resident} resident, all {all} experts in memory ({experts})")
            }
            Plan::Slots { slots, scope } => {
                let total = slot_count(facts.geometry, slots, scope);
                let share = 100.0 * total as f64 / all.max(1) as f64;
                let bytes = print::bytes(facts.bytes_of(slots, scope));
                let cut = match scope {
                    Scope::Layer => format!("{slots} per layer"),
                    Scope::Global => "shared by all layers".into(),
                };
                let warning = if self.thrashes(facts.geometry) {
                    "; fewer than one token uses, so hardly any expert will be found in memory"
                } else {
                    ""
                };
                format!("plan: {resident} resident, {total} of {all} experts ({share:.0} %) in {bytes}, {cut}{warning}")
            }
        }
    }

    /// Whether one token alone needs more slots than there are.
    fn thrashes(&self, geometry: &Geometry) -> bool {
        match *self {
            Plan::AllResident => false,
            Plan::Slots { slots, scope: Scope::Layer } => slots < geometry.top_k,
            Plan::Slots { slots, scope: Scope::Global } => slots < geometry.top_k * geometry.moe_layers.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_core::LayerIdx;

    use super::*;
    use crate::cli::{ByteSize, ScopeFlag};

    fn geometry() -> Geometry {
        let moe_layers = (0..4).map(LayerIdx).collect();
        Geometry { layers: 4, moe_layers, experts: 8, top_k: 2, hidden: 8, inter: 8, bias: false }
    }

    fn flags(cache_experts: Option<usize>, cache_mem: Option<u64>, cache_scope: ScopeFlag) -> CacheFlags {
        let (eviction, reader) = ("lru".into(), "auto".into());
        CacheFlags { cache_experts, cache_mem: cache_mem.map(ByteSize), cache_scope, eviction, reader }
    }

    #[test]
    fn memory_decides_unless_somebody_does() {
        let geometry = geometry();
        let mega = 1 << 20;
        let facts = |available| Facts { geometry: &geometry, resident: mega, slot: mega, available };
        let (layer, global) = (ScopeFlag::Layer, ScopeFlag::Global);
        let enough = Some(SPARE_BYTES + 40 * mega);
        let tight = Some(SPARE_BYTES + 10 * mega);
        let none = flags(None, None, layer);
        assert_eq!(decide(&facts(enough), &none).unwrap(), Plan::AllResident);
        assert_eq!(decide(&facts(None), &none).unwrap(), Plan::AllResident);
        let slots = |slots, scope| Plan::Slots { slots, scope };
        assert_eq!(decide(&facts(tight), &none).unwrap(), slots(2, Scope::Layer));
        assert_eq!(decide(&facts(tight), &flags(None, None, global)).unwrap(), slots(9, Scope::Global));
        assert_eq!(decide(&facts(enough), &flags(Some(3), None, layer)).unwrap(), slots(3, Scope::Layer));
        assert_eq!(decide(&facts(enough), &flags(Some(3), None, global)).unwrap(), slots(12, Scope::Global));
        assert_eq!(decide(&facts(enough), &flags(None, Some(8 * mega), layer)).unwrap(), slots(2, Scope::Layer));
        let said = decide(&facts(tight), &flags(Some(5), None, layer)).unwrap_err().to_string();
        assert!(said.ends_with("--cache-experts 2 would"), "{said}");
        assert!(decide(&facts(Some(mega)), &none).unwrap_err().to_string().contains("not even one slot"));
    }
}
