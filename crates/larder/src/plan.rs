//! How much of a model stays in memory, decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::{CacheScope, slot_count};
use larder_core::Blueprint;
use larder_model::KvFormat;
use serde_json::{Value, json};

use crate::cli::EngineFlags;
use crate::print;

pub mod tiers;

/// Left over, for what the system does on the process's behalf and for what nobody thought of.
const RESERVE_BYTES: u64 = 64 << 20;
/// The same where slots are page-locked, so that the system cannot take them back, and a driver is at work.
const RESERVE_BYTES_WITH_GPU: u64 = 512 << 20;
/// Buffers through which weights go to a GPU.
const UPLOAD_BUFFER_BYTES: u64 = 8 << 20;
/// But no more than this part of what is available: a small control group has no such surprises.
const RESERVE_DIVISOR: u64 = 8;

/// What a plan is made from.
pub struct PlanInputs<'a> {
    /// The model, as its config has it.
    pub blueprint: &'a Blueprint,
    /// Bytes of the resident weights.
    pub resident_bytes: u64,
    /// Bytes of the largest expert.
    pub slot_bytes: u64,
    /// Slots beside those that are planned.
    pub scratch_slots: usize,
    /// Tokens to have room for.
    pub context: usize,
    /// Sequences of so many tokens that are remembered at a time.
    pub sequences: usize,
    /// How they are remembered.
    pub kv_format: KvFormat,
    /// Tokens that are read at once.
    pub chunk: usize,
    /// Bytes that the process holds before anything is loaded.
    pub process_bytes: u64,
    /// Bytes of memory that can be used, where the system tells.
    pub available_bytes: Option<u64>,
    /// Whether a GPU computes: then it remembers sequences, and what goes there and comes back lies in buffers that cannot
    /// be paged out.
    pub on_gpu: bool,
}

/// Where the experts are while the model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryPlan {
    /// All in memory.
    AllResident,
    /// On disk, passing through slots: so many per layer or, in global scope, in all.
    Slots {
        /// The number.
        slots: usize,
        /// What it counts.
        scope: CacheScope,
    },
}

impl PlanInputs<'_> {
    fn layers(&self) -> usize {
        self.blueprint.geometry.moe_layers.len().max(1)
    }

    fn all_expert_bytes(&self) -> u64 {
        self.blueprint.geometry.expert_count() as u64 * self.slot_bytes
    }

    /// Bytes that remember the sequences.
    pub fn kv_bytes(&self) -> u64 {
        self.sequences as u64 * self.blueprint.sequence_memory.bytes(self.context, self.kv_format.bytes())
    }

    /// Those of them that are in memory.
    fn host_kv_bytes(&self) -> u64 {
        if self.on_gpu { 0 } else { self.kv_bytes() }
    }

    /// Bytes of activations while a chunk is read, beside what the process holds anyway.
    pub fn scratch_bytes(&self) -> u64 {
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
    fn gpu_buffer_bytes(&self) -> u64 {
        if self.on_gpu { self.scratch_bytes() + UPLOAD_BUFFER_BYTES } else { 0 }
    }

    /// All but the experts.
    fn base_bytes(&self) -> u64 {
        let slots = self.scratch_slots as u64 * self.slot_bytes;
        self.process_bytes
            + self.resident_bytes
            + self.host_kv_bytes()
            + self.scratch_bytes()
            + self.gpu_buffer_bytes()
            + slots
    }

    /// Bytes that are left to whatever else happens.
    fn reserve_bytes(&self) -> u64 {
        let most = if self.on_gpu { RESERVE_BYTES_WITH_GPU } else { RESERVE_BYTES };
        self.available_bytes.map_or(most, |available| most.min(available / RESERVE_DIVISOR))
    }

    /// Bytes for slots beside everything else.
    fn slot_budget(&self) -> Option<u64> {
        Some((self.available_bytes? + self.process_bytes).saturating_sub(self.base_bytes() + self.reserve_bytes()))
    }

    /// Slots per layer, or in all, that fit into `bytes`.
    fn slots_in(&self, bytes: u64, scope: CacheScope) -> usize {
        let total = bytes / self.slot_bytes.max(1);
        match scope {
            CacheScope::Layer => (total / self.layers() as u64).min(self.blueprint.geometry.experts as u64) as usize,
            CacheScope::Global => total.min(self.blueprint.geometry.expert_count() as u64) as usize,
        }
    }

    /// Slots per layer, or in all, for so many experts of each layer.
    fn slots_for(&self, per_layer: usize, scope: CacheScope) -> usize {
        let geometry = &self.blueprint.geometry;
        match scope {
            CacheScope::Layer => per_layer.min(geometry.experts),
            CacheScope::Global => per_layer.saturating_mul(self.layers()).min(geometry.expert_count()),
        }
    }

    /// Experts of each layer for which so many slots are.
    fn per_layer(&self, slots: usize, scope: CacheScope) -> usize {
        match scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots / self.layers(),
        }
    }

    fn bytes_of_slots(&self, slots: usize, scope: CacheScope) -> u64 {
        slot_count(&self.blueprint.geometry, slots, scope) as u64 * self.slot_bytes
    }

    fn context_text(&self) -> String {
        match self.sequences {
            1 => format!("{} tokens", self.context),
            n => format!("{n} × {} tokens", self.context),
        }
    }

    fn other_uses(&self) -> String {
        let context = match self.on_gpu {
            false => format!(" {} for {} of context,", print::bytes(self.kv_bytes()), self.context_text()),
            true => format!(" {} of buffers for the GPU,", print::bytes(self.gpu_buffer_bytes())),
        };
        format!(
            "{} of resident weights,{context} {} of scratch and {} to spare",
            print::bytes(self.resident_bytes),
            print::bytes(self.scratch_bytes() + self.process_bytes),
            print::bytes(self.reserve_bytes())
        )
    }
}

/// Decides by what was asked for and what there is.
pub fn decide(inputs: &PlanInputs, flags: &EngineFlags) -> Result<MemoryPlan> {
    let scope = flags.cache_scope.into();
    let slots = match (requested_slots(inputs, flags), inputs.slot_budget()) {
        (Some(slots), _) => slots,
        (None, Some(room)) if room < inputs.all_expert_bytes() => inputs.slots_in(room, scope),
        (None, _) => return Ok(MemoryPlan::AllResident),
    };
    if slots == 0 {
        let least = print::bytes(inputs.bytes_of_slots(1, scope));
        bail!("not even one slot fits: that takes {least} for experts beside {}", inputs.other_uses());
    }
    check_fits(inputs, slots, scope)?;
    Ok(MemoryPlan::Slots { slots, scope })
}

/// The slots in memory that somebody wants, if anybody does.
fn requested_slots(inputs: &PlanInputs, flags: &EngineFlags) -> Option<usize> {
    let scope = flags.cache_scope.into();
    match (flags.cache_experts, flags.cache_mem) {
        (Some(per_layer), _) => Some(inputs.slots_for(per_layer, scope)),
        (None, Some(bytes)) => Some(inputs.slots_in(bytes.0, scope)),
        (None, None) => None,
    }
}

fn check_fits(inputs: &PlanInputs, slots: usize, scope: CacheScope) -> Result<()> {
    let Some(room) = inputs.slot_budget() else { return Ok(()) };
    let need = inputs.bytes_of_slots(slots, scope);
    if need <= room {
        return Ok(());
    }
    let fits = inputs.slots_in(room, scope);
    let nearest = match inputs.per_layer(fits, scope) {
        0 => "not even one expert per layer would; a shorter context might".into(),
        n => format!("--cache-experts {n} would"),
    };
    bail!(
        "{} of slots do not fit beside {} into the {} that are available; {nearest}",
        print::bytes(need),
        inputs.other_uses(),
        print::bytes(inputs.available_bytes.unwrap_or_default()),
    )
}

impl MemoryPlan {
    /// Bytes of experts in memory.
    pub fn expert_bytes(&self, inputs: &PlanInputs) -> u64 {
        match *self {
            MemoryPlan::AllResident => inputs.all_expert_bytes(),
            MemoryPlan::Slots { slots, scope } => inputs.bytes_of_slots(slots, scope),
        }
    }

    /// Everything that the process will hold.
    pub fn total_bytes(&self, inputs: &PlanInputs) -> u64 {
        inputs.base_bytes() + self.expert_bytes(inputs)
    }

    /// A few lines for a person.
    pub fn describe(&self, inputs: &PlanInputs) -> String {
        let held = match *self {
            MemoryPlan::AllResident => format!("all {} experts", inputs.blueprint.geometry.expert_count()),
            MemoryPlan::Slots { slots, scope } => slots_text(inputs, slots, scope),
        };
        let mut said = format!(
            "plan: {} = {} resident + {} context of {} + {} scratch + {} {held}",
            print::bytes(self.total_bytes(inputs)),
            print::bytes(inputs.resident_bytes),
            print::bytes(inputs.kv_bytes()),
            inputs.context_text(),
            print::bytes(inputs.scratch_bytes() + inputs.process_bytes),
            print::bytes(self.expert_bytes(inputs)),
        );
        if let Some(available) = inputs.available_bytes {
            said += &format!("; {} available", print::bytes(available));
        }
        if let MemoryPlan::Slots { scope, .. } = *self {
            let floor = inputs.blueprint.geometry.top_k;
            said += &format!("\n      at least {floor} per layer, which one token uses");
            if let Some(room) = inputs.slot_budget() {
                said += &format!("; at most {}, which fit", inputs.per_layer(inputs.slots_in(room, scope), scope));
            }
            if self.thrashes(inputs) {
                said += "\n      warning: fewer than one token uses, so hardly any expert will be found in memory";
            }
        }
        said
    }

    /// The same for a program.
    pub fn json(&self, inputs: &PlanInputs) -> Value {
        let slots = match *self {
            MemoryPlan::AllResident => None,
            MemoryPlan::Slots { slots, .. } => Some(slots),
        };
        json!({
            "resident_bytes": inputs.resident_bytes,
            "context_tokens": inputs.context,
            "sequences": inputs.sequences,
            "context_bytes": inputs.kv_bytes(),
            "scratch_bytes": inputs.scratch_bytes() + inputs.process_bytes,
            "expert_bytes": inputs.slot_bytes,
            "slots": slots,
            "slot_bytes": self.expert_bytes(inputs),
            "total_bytes": self.total_bytes(inputs),
            "available_bytes": inputs.available_bytes,
            "floor_experts_per_layer": inputs.blueprint.geometry.top_k,
            "ceiling_experts_per_layer": inputs.slot_budget().map(|room| inputs.slots_in(room, CacheScope::Layer)),
        })
    }

    /// Whether one token alone needs more slots than there are.
    fn thrashes(&self, inputs: &PlanInputs) -> bool {
        let top_k = inputs.blueprint.geometry.top_k;
        match *self {
            MemoryPlan::AllResident => false,
            MemoryPlan::Slots { slots, scope: CacheScope::Layer } => slots < top_k,
            MemoryPlan::Slots { slots, scope: CacheScope::Global } => slots < top_k * inputs.layers(),
        }
    }
}

/// How many experts so many slots hold, for a person.
fn slots_text(inputs: &PlanInputs, slots: usize, scope: CacheScope) -> String {
    let all = inputs.blueprint.geometry.expert_count();
    let total = slot_count(&inputs.blueprint.geometry, slots, scope);
    let share = 100.0 * total as f64 / all.max(1) as f64;
    let cut = match scope {
        CacheScope::Layer => format!("{slots} per layer"),
        CacheScope::Global => "shared by all layers".into(),
    };
    format!("slots for {total} of {all} experts ({share:.0} %, {cut})")
}

#[cfg(test)]
mod tests {
    use larder_core::{ExpertNames, Geometry, LayerIdx, SequenceMemory};

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
            sequence_memory: SequenceMemory { values_per_token: 1 << 9, fixed_bytes: 0 },
        }
    }

    /// What has to be available so that this much is left.
    pub fn beside_reserve(bytes: u64) -> u64 {
        (bytes * RESERVE_DIVISOR).div_ceil(RESERVE_DIVISOR - 1)
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

    pub fn inputs(blueprint: &Blueprint, available: Option<u64>) -> PlanInputs<'_> {
        PlanInputs {
            blueprint,
            kv_format: KvFormat::F16,
            resident_bytes: MEGA,
            slot_bytes: MEGA,
            scratch_slots: 0,
            context: 1024,
            sequences: 1,
            chunk: 1,
            process_bytes: MEGA,
            available_bytes: available,
            on_gpu: false,
        }
    }

    #[test]
    fn memory_decides_unless_somebody_does() {
        let blueprint = blueprint();
        let inputs = |available| inputs(&blueprint, available);
        let (layer, global) = (ScopeFlag::Layer, ScopeFlag::Global);
        let enough = Some(beside_reserve(40 * MEGA));
        let tight = Some(beside_reserve(12 * MEGA));
        let none = flags(None, None, layer);
        assert_eq!(decide(&inputs(enough), &none).unwrap(), MemoryPlan::AllResident);
        assert_eq!(decide(&inputs(None), &none).unwrap(), MemoryPlan::AllResident);
        let slots = |slots, scope| MemoryPlan::Slots { slots, scope };
        assert_eq!(decide(&inputs(tight), &none).unwrap(), slots(2, CacheScope::Layer));
        assert_eq!(decide(&inputs(tight), &flags(None, None, global)).unwrap(), slots(9, CacheScope::Global));
        assert_eq!(decide(&inputs(enough), &flags(Some(3), None, layer)).unwrap(), slots(3, CacheScope::Layer));
        assert_eq!(decide(&inputs(enough), &flags(Some(3), None, global)).unwrap(), slots(12, CacheScope::Global));
        assert_eq!(decide(&inputs(enough), &flags(None, Some(8 * MEGA), layer)).unwrap(), slots(2, CacheScope::Layer));
        let said = decide(&inputs(tight), &flags(Some(5), None, layer)).unwrap_err().to_string();
        assert!(said.ends_with("--cache-experts 2 would"), "{said}");
        assert!(decide(&inputs(Some(MEGA)), &none).unwrap_err().to_string().contains("not even one slot"));
        assert!(decide(&inputs(Some(MEGA)), &flags(Some(5), None, layer)).unwrap_err().to_string().contains("context"));
    }

    #[test]
    fn everything_is_in_the_total() {
        let blueprint = blueprint();
        let inputs = PlanInputs { sequences: 2, ..inputs(&blueprint, Some(beside_reserve(40 * MEGA))) };
        let plan = decide(&inputs, &flags(Some(1), None, ScopeFlag::Layer)).unwrap();
        assert_eq!(plan.total_bytes(&inputs), 4 * MEGA + inputs.scratch_bytes() + 4 * MEGA);
        let said = plan.describe(&inputs);
        assert!(said.contains("at least 2 per layer") && said.contains("warning"), "{said}");
    }
}
