//! The memory plan: how many experts stay in memory, decided before anything is loaded.
//!
//! A context that is not given a length is as long as its share of memory allows: half of what all experts leave, or an
//! eighth of what experts, keys and values share.

use larder_cache::{CacheScope, pass_through_slots, slot_count};
use larder_core::{Blueprint, CheckpointPolicy, format_bytes};
use larder_kernels::{PRODUCT_SCRATCH_BYTES, attention_scratch_bytes};
use larder_model::KvFormat;
use larder_policy::eviction::CacheShape;
use serde_json::{Value, json};

use crate::machine::budget::MemoryUse;

mod context;
mod decide;
mod draft;
mod elastic;
mod expert_sizes;
pub mod kv_places;
mod prefill;
mod reserve;
pub mod tier_speed;
pub mod tiers;
mod vision;

pub(crate) use context::{with_context, with_context_on_gpu};
pub use decide::decide;
use decide::{check_fits, no_slot, requested_slots};
pub use draft::DraftMemory;
pub(crate) use elastic::ElasticPlan;
pub use expert_sizes::ExpertSizes;
pub(crate) use prefill::{LEAST_TOKENS, prefill_tokens};
pub use reserve::reserve_bytes;
pub use vision::VisionMemory;

/// Staging buffers through which weights are copied to a GPU.
const UPLOAD_BUFFER_BYTES: u64 = 8 << 20;
/// Pinned checkpoints for which memory is counted.
const COUNTED_PINS: usize = 3;

/// Inputs of a plan.
#[derive(Clone)]
pub struct PlanInputs<'a> {
    /// The model's config.
    pub blueprint: &'a Blueprint,
    /// Bytes of the resident weights.
    pub resident_bytes: u64,
    /// Sizes of the experts.
    pub expert_sizes: ExpertSizes,
    /// Scratch slots, beside those that are planned.
    pub scratch_slots: usize,
    /// Context size in tokens.
    pub context: usize,
    /// Number of sequences with a KV cache of that size.
    pub sequences: usize,
    /// Those of them that always have room for a whole context.
    pub whole_contexts: usize,
    /// The most tokens that are drafted in a step of one sequence.
    pub drafts: usize,
    /// The model that drafts them, if there is one.
    pub draft: Option<DraftMemory>,
    /// Memory of images, if the model sees.
    pub vision: Option<VisionMemory>,
    /// The most bytes of KV cache of all sequences; `None` for as many as all contexts need.
    pub kv_limit_bytes: Option<u64>,
    /// Number format of the KV cache.
    pub kv_format: KvFormat,
    /// When checkpoints of recurrent states are taken.
    pub kv_checkpoints: CheckpointPolicy,
    /// Whether tokens are computed a second time in a copy of their sequence, because it cannot go back by one.
    pub measures_in_copy: bool,
    /// The most tokens of a step, and so of a prefill chunk.
    pub prefill_tokens: usize,
    /// Compute threads.
    pub threads: usize,
    /// Memory of the process before anything is loaded, in bytes.
    pub process_bytes: u64,
    /// Memory that code pages, stacks and the allocator will take beyond that, in bytes.
    pub growth_bytes: u64,
    /// Memory of the texts that are tokenised while the model runs, in bytes for each token of the context.
    pub tokenising_bytes_per_token: u64,
    /// Available memory in bytes; `None` if unknown.
    pub available_bytes: Option<u64>,
    /// The most memory that the process may ever have, in bytes; `None` if unknown.
    pub limit_bytes: Option<u64>,
    /// Whether a GPU computes: then staging buffers in page-locked memory are needed.
    pub on_gpu: bool,
    /// The most layers that have their keys and values in VRAM with a GPU.
    pub vram_kv_layers: usize,
}

/// Where the experts are while the model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryPlan {
    /// All in memory.
    AllResident,
    /// On the SSD, cached in slots.
    Slots {
        /// Number of slots, per layer or, in global scope, in total.
        slots: usize,
        /// What shares the slots.
        scope: CacheScope,
    },
    /// As [`Slots`](Self::Slots), and the number follows the available memory.
    Elastic(ElasticPlan),
}

impl PlanInputs<'_> {
    fn layers(&self) -> usize {
        self.blueprint.geometry.moe_layers.len().max(1)
    }

    /// Whether a slot has the size of the experts of its layer; else each has that of the largest expert.
    fn slots_belong_to_layers(&self, scope: CacheScope) -> bool {
        !self.on_gpu && belong_to_layers(scope, self.scratch_slots)
    }

    /// Bytes of a slot in every layer, together.
    fn slot_per_layer_bytes(&self) -> u64 {
        if self.slots_belong_to_layers(CacheScope::Layer) {
            self.expert_sizes.one_per_layer()
        } else {
            self.layers() as u64 * self.expert_sizes.largest()
        }
    }

    /// Bytes of all experts in slots.
    pub fn all_expert_bytes(&self) -> u64 {
        self.bytes_of_slots(self.blueprint.geometry.experts, CacheScope::Layer)
    }

    /// The most bytes of the KV caches and recurrent states of all sequences.
    pub fn kv_bytes(&self) -> u64 {
        let all = self.page_bytes().saturating_add(self.recurrent_bytes()).min(self.kv_limit_bytes.unwrap_or(u64::MAX));
        all.saturating_add(self.copy_bytes()).saturating_add(self.moving_bytes())
    }

    /// Bytes of the copy of a sequence in which tokens are measured: a page of each layer, and recurrent states before
    /// and behind a checkpoint.
    fn copy_bytes(&self) -> u64 {
        let memory = &self.blueprint.sequence_memory;
        let copy = memory.kv_bytes(1, 1, self.kv_format.kind()).saturating_add(2 * memory.state_bytes as u64);
        if self.measures_in_copy { copy } else { 0 }
    }

    /// The most bytes of the recurrent states of all sequences, with their checkpoints. Few of the pinned ones are
    /// counted, as sequences share them, and others give them up where memory is short.
    fn recurrent_bytes(&self) -> u64 {
        let memory = &self.blueprint.sequence_memory;
        let one = memory.recurrent_bytes(self.context, &self.kv_checkpoints);
        let pins = self.kv_checkpoints.pins.min(COUNTED_PINS) as u64;
        let pinned = memory.pinned_bytes(self.kv_format.kind()).saturating_mul(pins);
        one.saturating_mul(self.sequences as u64).saturating_add(pinned)
    }

    /// Bytes of buffers during a step: activations, and what threads unpack weights into.
    pub fn scratch_bytes(&self) -> u64 {
        self.activation_bytes().saturating_add(self.threads.saturating_mul(PRODUCT_SCRATCH_BYTES) as u64)
    }

    /// Bytes of activations during a step, with the scores of attention and the logits of each sequence.
    fn activation_bytes(&self) -> u64 {
        let attention = attention_scratch_bytes(self.context, self.blueprint.sequence_memory.widest_row, self.threads);
        // The draft tokens of one sequence are computed at a time, and their logits copied once.
        let logits = (3 * self.sequences + 2 * self.drafts)
            .saturating_mul(self.blueprint.vocab)
            .saturating_mul(size_of::<f32>());
        let fixed = attention.saturating_add(logits) as u64;
        self.blueprint.step_memory.bytes(self.prefill_tokens).saturating_add(fixed)
    }

    /// Bytes of staging buffers between memory and a GPU.
    fn gpu_buffer_bytes(&self) -> u64 {
        if self.on_gpu { self.activation_bytes().saturating_add(UPLOAD_BUFFER_BYTES) } else { 0 }
    }

    /// Bytes of the draft model.
    fn draft_bytes(&self) -> u64 {
        self.draft.as_ref().map_or(0, |draft| draft.bytes)
    }

    /// Bytes of the image tower and of what it takes.
    fn vision_bytes(&self) -> u64 {
        self.vision.as_ref().map_or(0, VisionMemory::bytes)
    }

    /// Bytes of the process without its model.
    fn process_ceiling(&self) -> u64 {
        let tokenising = self.tokenising_bytes_per_token.saturating_mul(self.context as u64);
        (self.process_bytes + self.growth_bytes).saturating_add(tokenising)
    }

    /// Bytes of the process and its workspaces in a plan with `cached` bytes of experts.
    fn process_and_workspace_bytes(&self, cached: u64) -> u64 {
        let parts = self.parts(cached);
        let of_both = |(part, _): &&(MemoryUse, u64)| matches!(part, MemoryUse::Process | MemoryUse::Workspaces);
        parts.iter().filter(of_both).map(|(_, bytes)| bytes).sum()
    }

    /// Bytes of everything but cached experts.
    fn base_bytes(&self) -> u64 {
        let slots = self.scratch_slots as u64 * self.expert_sizes.largest();
        [
            self.process_ceiling(),
            self.resident_bytes,
            self.host_kv_bytes(),
            self.scratch_bytes(),
            self.gpu_buffer_bytes(),
            self.draft_bytes(),
            self.vision_bytes(),
            slots,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// The parts of a plan with `cached` bytes of experts, by what they are for.
    fn parts(&self, cached: u64) -> Vec<(MemoryUse, u64)> {
        let experts = cached + self.scratch_slots as u64 * self.expert_sizes.largest();
        vec![
            (MemoryUse::Process, self.process_ceiling()),
            (MemoryUse::ResidentWeights, self.resident_bytes),
            (MemoryUse::KvCache, self.host_kv_bytes()),
            (MemoryUse::Workspaces, self.scratch_bytes() + self.gpu_buffer_bytes()),
            (MemoryUse::DraftModel, self.draft_bytes()),
            (MemoryUse::Images, self.vision_bytes()),
            (MemoryUse::Experts, experts),
        ]
    }

    /// Bytes that stay unused, as reserve.
    fn reserve_bytes(&self) -> u64 {
        reserve::bytes(self.available_bytes, self.on_gpu)
    }

    /// Bytes available for slots; `None` if the available memory is unknown.
    fn slot_budget(&self) -> Option<u64> {
        let taken = self.base_bytes().saturating_add(self.reserve_bytes());
        Some((self.available_bytes? + self.process_bytes).saturating_sub(taken))
    }

    /// Slots that fit into `bytes`: per layer or, in global scope, in total.
    fn slots_in(&self, bytes: u64, scope: CacheScope) -> usize {
        let most = self.slots_for(self.blueprint.geometry.experts, scope);
        let without_others = (bytes / self.slot_bytes(scope).max(1)).min(most as u64) as usize;
        let fits = |slots: &usize| self.bytes_of_slots(*slots, scope) <= bytes;
        (0..=without_others).rev().find(fits).unwrap_or(0)
    }

    /// Pass-through slots beside `slots`. With a GPU they are the scratch slots.
    fn pass_through_slots(&self, slots: usize, scope: CacheScope) -> usize {
        if self.on_gpu { 0 } else { pass_through_slots(&CacheShape::new(&self.blueprint.geometry, slots, scope)) }
    }

    /// Slots for `per_layer` experts of each layer: per layer or, in global scope, in total.
    fn slots_for(&self, per_layer: usize, scope: CacheScope) -> usize {
        let geometry = &self.blueprint.geometry;
        match scope {
            CacheScope::Layer => per_layer.min(geometry.experts),
            CacheScope::Global => per_layer.saturating_mul(self.layers()).min(geometry.expert_count()),
        }
    }

    /// Experts per layer that `slots` hold.
    fn per_layer(&self, slots: usize, scope: CacheScope) -> usize {
        match scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots / self.layers(),
        }
    }

    /// Bytes of one slot more: of one per layer or, in global scope, of one.
    fn slot_bytes(&self, scope: CacheScope) -> u64 {
        match scope {
            CacheScope::Layer => self.slot_per_layer_bytes(),
            CacheScope::Global => self.expert_sizes.largest(),
        }
    }

    /// Bytes of `slots` and their pass-through slots.
    fn bytes_of_slots(&self, slots: usize, scope: CacheScope) -> u64 {
        let pass_through = self.pass_through_slots(slots, scope) as u64;
        slots as u64 * self.slot_bytes(scope) + pass_through * self.expert_sizes.largest()
    }

    fn context_text(&self) -> String {
        match (self.sequences, self.kv_limit_bytes) {
            (1, None) => format!("{} tokens", self.context),
            (n, None) => format!("{n} × {} tokens", self.context),
            (n, Some(_)) => format!("shared by {n} × {} tokens", self.context),
        }
    }

    fn other_uses(&self) -> String {
        let context = if self.on_gpu {
            format!(
                " {} of GPU staging buffers, {} of KV cache,",
                format_bytes(self.gpu_buffer_bytes()),
                format_bytes(self.host_kv_bytes())
            )
        } else {
            format!(" {} of KV cache ({}),", format_bytes(self.kv_bytes()), self.context_text())
        };
        let draft = self.draft.as_ref().map(|draft| format!("{} for the draft model, ", format_bytes(draft.bytes)));
        let draft = draft.unwrap_or_default();
        let vision = self.vision.as_ref().map(|vision| format!("{} for images, ", format_bytes(vision.bytes())));
        let vision = vision.unwrap_or_default();
        format!(
            "{} of resident weights,{context} {draft}{vision}{} for the process and activations and {} of reserve",
            format_bytes(self.resident_bytes),
            format_bytes(self.scratch_bytes() + self.process_ceiling()),
            format_bytes(self.reserve_bytes())
        )
    }
}

impl MemoryPlan {
    /// Bytes of experts in memory, at most.
    pub fn expert_bytes(&self, inputs: &PlanInputs) -> u64 {
        match *self {
            MemoryPlan::AllResident => inputs.all_expert_bytes(),
            MemoryPlan::Slots { slots, scope } => inputs.bytes_of_slots(slots, scope),
            MemoryPlan::Elastic(plan) => plan.bytes_of(plan.most),
        }
    }

    /// Memory that the process will use, in bytes: the memory ceiling.
    pub fn total_bytes(&self, inputs: &PlanInputs) -> u64 {
        self.parts(inputs).iter().map(|(_, bytes)| bytes).sum()
    }

    /// The parts of that total, by what they are for.
    pub fn parts(&self, inputs: &PlanInputs) -> Vec<(MemoryUse, u64)> {
        inputs.parts(self.expert_bytes(inputs))
    }

    /// The plan as text of a few lines.
    pub fn describe(&self, inputs: &PlanInputs) -> String {
        let held = match *self {
            MemoryPlan::AllResident => format!("all {} experts", inputs.blueprint.geometry.expert_count()),
            MemoryPlan::Slots { slots, scope } => {
                slots_text(inputs, slots, inputs.pass_through_slots(slots, scope), scope)
            }
            MemoryPlan::Elastic(plan) => plan.describe(inputs),
        };
        let mut text = format!(
            "plan: {}{} = {} resident weights + {} KV cache ({}) + {}{}{} process and activations + {} {held}",
            if matches!(self, MemoryPlan::Elastic(_)) { "at most " } else { "" },
            format_bytes(self.total_bytes(inputs)),
            format_bytes(inputs.resident_bytes),
            format_bytes(inputs.kv_bytes()),
            inputs.context_text(),
            DraftMemory::text(inputs.draft.as_ref()),
            VisionMemory::text(inputs.vision.as_ref()),
            format_bytes(inputs.process_and_workspace_bytes(self.expert_bytes(inputs))),
            format_bytes(self.expert_bytes(inputs)),
        );
        if let Some(available) = inputs.available_bytes {
            text += &format!("; {} available", format_bytes(available));
        }
        text += &prefill_text(inputs);
        if let Some((_, scope)) = self.slots() {
            let floor = inputs.blueprint.geometry.top_k;
            text += &format!("\n      experts per layer: at least {floor}, which one token uses");
            if let Some(budget) = inputs.slot_budget() {
                text += &format!(", at most {}, which fit", inputs.per_layer(inputs.slots_in(budget, scope), scope));
            }
            if let Some(classes) = inputs.expert_sizes.classes_text() {
                text += &if inputs.slots_belong_to_layers(scope) {
                    format!("\n      slots: {classes}")
                } else {
                    format!(
                        "\n      slots: {} each, that of the largest expert ({classes})",
                        format_bytes(inputs.expert_sizes.largest())
                    )
                };
            }
            if self.thrashes(inputs) {
                text += "\n      warning: fewer slots than one token uses, so there will be almost no cache hits";
            }
        }
        text
    }

    /// The plan as JSON.
    pub fn json(&self, inputs: &PlanInputs) -> Value {
        let elastic = match self {
            MemoryPlan::Elastic(plan) => Some(plan),
            _ => None,
        };
        json!({
            "resident_bytes": inputs.resident_bytes,
            "context_tokens": inputs.context,
            "sequences": inputs.sequences,
            "context_bytes": inputs.kv_bytes(),
            "scratch_bytes": inputs.process_and_workspace_bytes(self.expert_bytes(inputs)),
            "draft": DraftMemory::json(inputs.draft.as_ref()),
            "images": VisionMemory::json(inputs.vision.as_ref()),
            "prefill_tokens": inputs.prefill_tokens,
            "expert_bytes": inputs.expert_sizes.largest(),
            "expert_classes": inputs.expert_sizes.classes().iter().map(|(bytes, layers)| json!({ "bytes": bytes, "layers": layers })).collect::<Vec<_>>(),
            "slots": self.slots().map(|(slots, _)| slots),
            "least_slots": elastic.map(|plan| plan.least),
            "most_slots": elastic.map(|plan| plan.most),
            "pass_through_slots": self.pass_through_slots(inputs),
            "slot_bytes": self.expert_bytes(inputs),
            "total_bytes": self.total_bytes(inputs),
            "available_bytes": inputs.available_bytes,
            "floor_experts_per_layer": inputs.blueprint.geometry.top_k,
            "ceiling_experts_per_layer": inputs.slot_budget().map(|budget| inputs.slots_in(budget, CacheScope::Layer)),
        })
    }

    fn pass_through_slots(&self, inputs: &PlanInputs) -> usize {
        match *self {
            MemoryPlan::AllResident => 0,
            MemoryPlan::Slots { slots, scope } => inputs.pass_through_slots(slots, scope),
            MemoryPlan::Elastic(plan) => plan.pass_through,
        }
    }

    /// The number of slots, per layer or, in global scope, in total; that at the start if it changes. `None` if all
    /// experts are in memory.
    pub fn slots(&self) -> Option<(usize, CacheScope)> {
        match *self {
            MemoryPlan::AllResident => None,
            MemoryPlan::Slots { slots, scope } | MemoryPlan::Elastic(ElasticPlan { slots, scope, .. }) => {
                Some((slots, scope))
            }
        }
    }

    /// Whether there are fewer slots than one token uses.
    fn thrashes(&self, inputs: &PlanInputs) -> bool {
        let top_k = inputs.blueprint.geometry.top_k;
        match self.slots() {
            None => false,
            Some((slots, CacheScope::Layer)) => slots < top_k,
            Some((slots, CacheScope::Global)) => slots < top_k * inputs.layers(),
        }
    }
}

/// Whether a slot of a cache only ever holds experts of one layer, so that it can have their size: not if layers
/// share slots, be it all of them or scratch slots.
pub(crate) fn belong_to_layers(scope: CacheScope, scratch: usize) -> bool {
    scope == CacheScope::Layer && scratch == 0
}

/// The size of prefill chunks, as a line of its own.
fn prefill_text(inputs: &PlanInputs) -> String {
    format!("\n      prefill: chunks of up to {} tokens", inputs.prefill_tokens)
}

/// How many experts `slots` hold, as text.
fn slots_text(inputs: &PlanInputs, slots: usize, pass_through: usize, scope: CacheScope) -> String {
    let all = inputs.blueprint.geometry.expert_count();
    let total = slot_count(&inputs.blueprint.geometry, slots, scope);
    let share = 100.0 * total as f64 / all.max(1) as f64;
    let division = match scope {
        CacheScope::Layer => format!("{slots} per layer"),
        CacheScope::Global => "shared by all layers".into(),
    };
    let through = match pass_through {
        0 => String::new(),
        1 => " + 1 pass-through slot".into(),
        some => format!(" + {some} pass-through slots"),
    };
    format!("slots for {total} of {all} experts ({share:.0} %, {division}){through}")
}

#[cfg(test)]
mod tests;
