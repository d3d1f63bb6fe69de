//! How much of a model stays in memory, decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::{Scope, slot_count};
use larder_core::Blueprint;
use larder_model::Memory;
use serde_json::{Value, json};

use crate::cli::EngineFlags;
use crate::print;

pub mod tiers;

/// Left over, for what the system does on the process's behalf and for what nobody thought of.
const SPARE_BYTES: u64 = 64 << 20;
/// The same where slots are page-locked, so that the system cannot take them back, and a driver is at work.
const SPARE_BYTES_BESIDE_GPU: u64 = 512 << 20;
/// Buffers through which weights go to a GPU.
const PIECES_BYTES: u64 = 8 << 20;
/// But no more than this part of what is available: a small control group has no such surprises.
const SPARE_SHARE: u64 = 8;

/// What a plan is made from.
pub struct Facts<'a> {
    /// The model, as its config has it.
    pub blueprint: &'a Blueprint,
    /// Bytes of the resident weights.
    pub resident: u64,
    /// Bytes of the largest expert.
    pub slot: u64,
    /// Slots beside those that are planned.
    pub scratch_slots: usize,
    /// Tokens to have room for.
    pub context: usize,
    /// Sequences of so many tokens that are remembered at a time.
    pub sequences: usize,
    /// How they are remembered.
    pub memory: Memory,
    /// Tokens that are read at once.
    pub chunk: usize,
    /// Bytes that the process holds before anything is loaded.
    pub process: u64,
    /// Bytes of memory that can be used, where the system tells.
    pub available: Option<u64>,
    /// Whether a GPU computes: then it remembers sequences, and what goes there and comes back lies in buffers that cannot
    /// be paged out.
    pub on_gpu: bool,
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
    fn layers(&self) -> usize {
        self.blueprint.geometry.moe_layers.len().max(1)
    }

    fn all_experts(&self) -> u64 {
        self.blueprint.geometry.expert_count() as u64 * self.slot
    }

    /// Bytes that remember the sequences.
    pub fn remembered(&self) -> u64 {
        self.sequences as u64 * self.blueprint.memory.bytes(self.context, self.memory.bytes())
    }

    /// Those of them that are in memory.
    fn remembered_here(&self) -> u64 {
        if self.on_gpu { 0 } else { self.remembered() }
    }

    /// Bytes of activations while a chunk is read, beside what the process holds anyway.
    pub fn scratch(&self) -> u64 {
        let g = &self.blueprint.geometry;
        let float = size_of::<f32>();
        // Per token: the stream and what attention and norms make of it; per expert of a token: gate, up and what
        // goes into down, quantised as well, then down's output, before and after it is put in its place.
        let stream = 12 * g.hidden * float;
        let expert = g.inter * (3 * float + 2) + 2 * g.hidden * float;
        let logits = 3 * self.blueprint.vocab * float;
        (self.chunk * (stream + g.top_k * expert) + logits) as u64
    }

    /// Bytes of memory through which a GPU gets what it computes with and gives back what it computed.
    fn buffers(&self) -> u64 {
        if self.on_gpu { self.scratch() + PIECES_BYTES } else { 0 }
    }

    /// All but the experts.
    fn base(&self) -> u64 {
        let slots = self.scratch_slots as u64 * self.slot;
        self.process + self.resident + self.remembered_here() + self.scratch() + self.buffers() + slots
    }

    /// Bytes that are left to whatever else happens.
    fn spare(&self) -> u64 {
        let most = if self.on_gpu { SPARE_BYTES_BESIDE_GPU } else { SPARE_BYTES };
        self.available.map_or(most, |available| most.min(available / SPARE_SHARE))
    }

    /// Bytes for slots beside everything else.
    fn room(&self) -> Option<u64> {
        Some((self.available? + self.process).saturating_sub(self.base() + self.spare()))
    }

    /// Slots per layer, or in all, that fit into `bytes`.
    fn slots_in(&self, bytes: u64, scope: Scope) -> usize {
        let total = bytes / self.slot.max(1);
        match scope {
            Scope::Layer => (total / self.layers() as u64).min(self.blueprint.geometry.experts as u64) as usize,
            Scope::Global => total.min(self.blueprint.geometry.expert_count() as u64) as usize,
        }
    }

    /// Slots per layer, or in all, for so many experts of each layer.
    fn slots_of(&self, per_layer: usize, scope: Scope) -> usize {
        let geometry = &self.blueprint.geometry;
        match scope {
            Scope::Layer => per_layer.min(geometry.experts),
            Scope::Global => per_layer.saturating_mul(self.layers()).min(geometry.expert_count()),
        }
    }

    /// Experts of each layer for which so many slots are.
    fn per_layer(&self, slots: usize, scope: Scope) -> usize {
        match scope {
            Scope::Layer => slots,
            Scope::Global => slots / self.layers(),
        }
    }

    fn bytes_of(&self, slots: usize, scope: Scope) -> u64 {
        slot_count(&self.blueprint.geometry, slots, scope) as u64 * self.slot
    }

    fn contexts(&self) -> String {
        match self.sequences {
            1 => format!("{} tokens", self.context),
            n => format!("{n} × {} tokens", self.context),
        }
    }

    fn beside(&self) -> String {
        let context = match self.on_gpu {
            false => format!(" {} for {} of context,", print::bytes(self.remembered()), self.contexts()),
            true => format!(" {} of buffers for the GPU,", print::bytes(self.buffers())),
        };
        format!(
            "{} of resident weights,{context} {} of scratch and {} to spare",
            print::bytes(self.resident),
            print::bytes(self.scratch() + self.process),
            print::bytes(self.spare())
        )
    }
}

/// Decides by what was asked for and what there is.
pub fn decide(facts: &Facts, flags: &EngineFlags) -> Result<Plan> {
    let scope = flags.cache_scope.into();
    let slots = match (asked(facts, flags), facts.room()) {
        (Some(slots), _) => slots,
        (None, Some(room)) if room < facts.all_experts() => facts.slots_in(room, scope),
        (None, _) => return Ok(Plan::AllResident),
    };
    if slots == 0 {
        let least = print::bytes(facts.bytes_of(1, scope));
        bail!("not even one slot fits: that takes {least} for experts beside {}", facts.beside());
    }
    check_fits(facts, slots, scope)?;
    Ok(Plan::Slots { slots, scope })
}

/// The slots in memory that somebody wants, if anybody does.
fn asked(facts: &Facts, flags: &EngineFlags) -> Option<usize> {
    let scope = flags.cache_scope.into();
    match (flags.cache_experts, flags.cache_mem) {
        (Some(per_layer), _) => Some(facts.slots_of(per_layer, scope)),
        (None, Some(bytes)) => Some(facts.slots_in(bytes.0, scope)),
        (None, None) => None,
    }
}

fn check_fits(facts: &Facts, slots: usize, scope: Scope) -> Result<()> {
    let Some(room) = facts.room() else { return Ok(()) };
    let need = facts.bytes_of(slots, scope);
    if need <= room {
        return Ok(());
    }
    let fits = facts.slots_in(room, scope);
    let nearest = match facts.per_layer(fits, scope) {
        0 => "not even one expert per layer would; a shorter context might".into(),
        n => format!("--cache-experts {n} would"),
    };
    bail!(
        "{} of slots do not fit beside {} into the {} that are available; {nearest}",
        print::bytes(need),
        facts.beside(),
        print::bytes(facts.available.unwrap_or_default()),
    )
}

impl Plan {
    /// Bytes of experts in memory.
    pub fn experts(&self, facts: &Facts) -> u64 {
        match *self {
            Plan::AllResident => facts.all_experts(),
            Plan::Slots { slots, scope } => facts.bytes_of(slots, scope),
        }
    }

    /// Everything that the process will hold.
    pub fn total(&self, facts: &Facts) -> u64 {
        facts.base() + self.experts(facts)
    }

    /// A few lines for a person.
    pub fn sentences(&self, facts: &Facts) -> String {
        let held = match *self {
            Plan::AllResident => format!("all {} experts", facts.blueprint.geometry.expert_count()),
            Plan::Slots { slots, scope } => held(facts, slots, scope),
        };
        let mut said = format!(
            "plan: {} = {} resident + {} context of {} + {} scratch + {} {held}",
            print::bytes(self.total(facts)),
            print::bytes(facts.resident),
            print::bytes(facts.remembered()),
            facts.contexts(),
            print::bytes(facts.scratch() + facts.process),
            print::bytes(self.experts(facts)),
        );
        if let Some(available) = facts.available {
            said += &format!("; {} available", print::bytes(available));
        }
        if let Plan::Slots { scope, .. } = *self {
            let floor = facts.blueprint.geometry.top_k;
            said += &format!("\n      at least {floor} per layer, which one token uses");
            if let Some(room) = facts.room() {
                said += &format!("; at most {}, which fit", facts.per_layer(facts.slots_in(room, scope), scope));
            }
            if self.thrashes(facts) {
                said += "\n      warning: fewer than one token uses, so hardly any expert will be found in memory";
            }
        }
        said
    }

    /// The same for a program.
    pub fn json(&self, facts: &Facts) -> Value {
        let slots = match *self {
            Plan::AllResident => None,
            Plan::Slots { slots, .. } => Some(slots),
        };
        json!({
            "resident_bytes": facts.resident,
            "context_tokens": facts.context,
            "sequences": facts.sequences,
            "context_bytes": facts.remembered(),
            "scratch_bytes": facts.scratch() + facts.process,
            "expert_bytes": facts.slot,
            "slots": slots,
            "slot_bytes": self.experts(facts),
            "total_bytes": self.total(facts),
            "available_bytes": facts.available,
            "floor_experts_per_layer": facts.blueprint.geometry.top_k,
            "ceiling_experts_per_layer": facts.room().map(|room| facts.slots_in(room, Scope::Layer)),
        })
    }

    /// Whether one token alone needs more slots than there are.
    fn thrashes(&self, facts: &Facts) -> bool {
        let top_k = facts.blueprint.geometry.top_k;
        match *self {
            Plan::AllResident => false,
            Plan::Slots { slots, scope: Scope::Layer } => slots < top_k,
            Plan::Slots { slots, scope: Scope::Global } => slots < top_k * facts.layers(),
        }
    }
}

/// How many experts so many slots hold, for a person.
fn held(facts: &Facts, slots: usize, scope: Scope) -> String {
    let all = facts.blueprint.geometry.expert_count();
    let total = slot_count(&facts.blueprint.geometry, slots, scope);
    let share = 100.0 * total as f64 / all.max(1) as f64;
    let cut = match scope {
        Scope::Layer => format!("{slots} per layer"),
        Scope::Global => "shared by all layers".into(),
    };
    format!("slots for {total} of {all} experts ({share:.0} %, {cut})")
}

#[cfg(test)]
mod tests {
    use larder_core::{ExpertNames, Geometry, LayerIdx, MemoryNeed};

    use super::*;
    use crate::cli::{ByteSize, ScopeFlag};
    use larder_policy::routing::RoutingSpec;

    pub const MEGA: u64 = 1 << 20;

    pub fn blueprint() -> Blueprint {
        let moe_layers = (0..4).map(LayerIdx).collect();
        Blueprint {
            model_type: "olmoe".into(),
            geometry: Geometry { layers: 4, moe_layers, experts: 8, top_k: 2, hidden: 8, inter: 8, bias: false },
            experts: ExpertNames::separate("experts", "gate", "up", "down"),
            resident: vec![],
            vocab: 8,
            context: 100,
            memory: MemoryNeed { per_token: 1 << 9, fixed: 0 },
        }
    }

    /// What has to be available so that this much is left.
    pub fn beside_spare(bytes: u64) -> u64 {
        (bytes * SPARE_SHARE).div_ceil(SPARE_SHARE - 1)
    }

    pub fn flags(cache_experts: Option<usize>, cache_mem: Option<u64>, cache_scope: ScopeFlag) -> EngineFlags {
        let (eviction, reader) = ("lru".parse().unwrap(), "auto".into());
        let cache_mem = cache_mem.map(ByteSize);
        let (prefetch, threads, pin, exact) = (0, None, false, false);
        let (no_store, preload, mlock, kv) = (false, false, false, None);
        let (evictor, cache_scratch, trace, trace_logits) = (None, 0, None, false);
        EngineFlags {
            no_store,
            cache_experts,
            cache_mem,
            preload,
            cache_scope,
            eviction,
            evictor,
            cache_scratch,
            routing: RoutingSpec::default(),
            trace,
            trace_logits,
            reader,
            prefetch,
            threads,
            pin,
            exact,
            kv,
            mlock,
            device: Default::default(),
            #[cfg(feature = "edge")]
            edge: Default::default(),
        }
    }

    pub fn facts(blueprint: &Blueprint, available: Option<u64>) -> Facts<'_> {
        Facts {
            blueprint,
            memory: Memory::F16,
            resident: MEGA,
            slot: MEGA,
            scratch_slots: 0,
            context: 1024,
            sequences: 1,
            chunk: 1,
            process: MEGA,
            available,
            on_gpu: false,
        }
    }

    #[test]
    fn memory_decides_unless_somebody_does() {
        let blueprint = blueprint();
        let facts = |available| facts(&blueprint, available);
        let (layer, global) = (ScopeFlag::Layer, ScopeFlag::Global);
        let enough = Some(beside_spare(40 * MEGA));
        let tight = Some(beside_spare(12 * MEGA));
        let none = flags(None, None, layer);
        assert_eq!(decide(&facts(enough), &none).unwrap(), Plan::AllResident);
        assert_eq!(decide(&facts(None), &none).unwrap(), Plan::AllResident);
        let slots = |slots, scope| Plan::Slots { slots, scope };
        assert_eq!(decide(&facts(tight), &none).unwrap(), slots(2, Scope::Layer));
        assert_eq!(decide(&facts(tight), &flags(None, None, global)).unwrap(), slots(9, Scope::Global));
        assert_eq!(decide(&facts(enough), &flags(Some(3), None, layer)).unwrap(), slots(3, Scope::Layer));
        assert_eq!(decide(&facts(enough), &flags(Some(3), None, global)).unwrap(), slots(12, Scope::Global));
        assert_eq!(decide(&facts(enough), &flags(None, Some(8 * MEGA), layer)).unwrap(), slots(2, Scope::Layer));
        let said = decide(&facts(tight), &flags(Some(5), None, layer)).unwrap_err().to_string();
        assert!(said.ends_with("--cache-experts 2 would"), "{said}");
        assert!(decide(&facts(Some(MEGA)), &none).unwrap_err().to_string().contains("not even one slot"));
        assert!(decide(&facts(Some(MEGA)), &flags(Some(5), None, layer)).unwrap_err().to_string().contains("context"));
    }

    #[test]
    fn everything_is_in_the_total() {
        let blueprint = blueprint();
        let facts = Facts { sequences: 2, ..facts(&blueprint, Some(beside_spare(40 * MEGA))) };
        let plan = decide(&facts, &flags(Some(1), None, ScopeFlag::Layer)).unwrap();
        assert_eq!(plan.total(&facts), 4 * MEGA + facts.scratch() + 4 * MEGA);
        let said = plan.sentences(&facts);
        assert!(said.contains("at least 2 per layer") && said.contains("warning"), "{said}");
    }
}
