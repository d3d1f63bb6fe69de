//! The memory plan with a GPU: how many experts are in VRAM and in memory, decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::CacheScope;
use larder_core::{Blueprint, format_bytes, size_down};
use larder_model::{CHOICE_TOKENS, device_attention_bytes};
use serde_json::{Value, json};

use super::{DraftMemory, PlanInputs, VisionMemory, check_fits, prefill_text, requested_slots, slots_text};
use crate::machine::budget::MemoryUse;
use crate::notices::Setting;
use crate::options::Options;

/// Reserve of VRAM for the driver, the kernels, graphs and other programs.
const RESERVE_BYTES: u64 = 256 << 20;
/// The reserve is at most this fraction of the free VRAM.
const RESERVE_DIVISOR: u64 = 8;

/// A GPU's memory, and the part of the model that is always in it.
pub struct Vram {
    /// Name of the GPU.
    pub name: String,
    /// Free VRAM in bytes.
    pub free_bytes: u64,
    /// Bytes of the resident weight matrices.
    pub resident_bytes: u64,
    /// Bytes of the embedding of tokens, which is there too if all experts are and steps are
    /// [async](larder_core::Blueprint::runs_ahead): none if the output head has the same weights; and the tables of
    /// experts that tokens decide on. `None` if steps are not.
    pub embedding_bytes: Option<u64>,
}

/// Bytes of the weight of an expert and of the address of its output.
const EXPERT_TERM_BYTES: usize = 16;
/// Bytes of lists, and of what is allocated in pieces, beyond what is used of it.
const DEVICE_LISTS_BYTES: u64 = 6 << 20;

/// Number of slots in both tiers: per layer or, in global scope, in total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierPlan {
    /// Slots in VRAM.
    pub device_slots: usize,
    /// Slots in main memory.
    pub host_slots: usize,
    /// Further slots in main memory, in total, for experts on their way to VRAM.
    pub pass_through: usize,
    /// What shares the slots.
    pub scope: CacheScope,
    /// Bytes of the embedding of tokens in VRAM, if it is there.
    pub embedding_bytes: Option<u64>,
}

impl Vram {
    /// Bytes of VRAM that stay unused, as reserve.
    fn reserve_bytes(&self) -> u64 {
        RESERVE_BYTES.min(self.free_bytes / RESERVE_DIVISOR)
    }

    /// Bytes of VRAM for everything but experts.
    pub(super) fn base_bytes(&self, inputs: &PlanInputs) -> u64 {
        let kv = self.resident_bytes.saturating_add(inputs.device_kv_bytes());
        kv.saturating_add(inputs.device_scratch_bytes())
    }

    /// Bytes of VRAM that may be used: as much as the options say, or all but the reserve.
    pub(super) fn budget(&self, options: &Options) -> Result<u64> {
        let most = self.free_bytes - self.reserve_bytes();
        match options.device.vram_bytes {
            Some(bytes) if bytes > most => bail!(
                "{} {} is more than the {} that are free on {}, less {} of reserve; use at most {}",
                Setting::Vram,
                format_bytes(bytes),
                format_bytes(self.free_bytes),
                self.name,
                format_bytes(self.reserve_bytes()),
                size_down(most)
            ),
            Some(bytes) => Ok(bytes),
            None => Ok(most),
        }
    }

    fn other_uses(&self, inputs: &PlanInputs) -> String {
        format!(
            "{} of resident weights, {} of KV cache ({}) and {} of activations",
            format_bytes(self.resident_bytes),
            format_bytes(inputs.device_kv_bytes()),
            inputs.device_context_text(),
            format_bytes(inputs.device_scratch_bytes()),
        )
    }
}

impl PlanInputs<'_> {
    /// Bytes of recurrent states on their way between main memory and a GPU, which are in both.
    pub(super) fn moving_bytes(&self) -> u64 {
        if self.on_gpu { self.blueprint.sequence_memory.state_bytes as u64 } else { 0 }
    }

    /// Bytes of KV cache in main memory: with a GPU recurrent states, and the keys and values of layers that have them
    /// there.
    pub(super) fn host_kv_bytes(&self) -> u64 {
        let pages = self.host_page_bytes();
        let copy = if pages > 0 { self.copy_bytes() } else { 0 };
        if self.on_gpu { self.recurrent_bytes().saturating_add(pages).saturating_add(copy) } else { self.kv_bytes() }
    }

    /// Bytes of activations in VRAM: those of two layers, of which none are freed before the next layer begins, beside
    /// what a layer takes that the CPU computes in parts; outputs of experts that it computes, on their way there,
    /// twice; what attention takes; and the activations of experts that the GPU chooses.
    fn device_scratch_bytes(&self) -> u64 {
        let Blueprint { geometry, step_memory, attention_heads, sequence_memory, .. } = self.blueprint;
        let layer = step_memory.bytes_per_token.saturating_mul(self.prefill_tokens);
        let output = EXPERT_TERM_BYTES + size_of::<f32>() * geometry.hidden;
        let outputs = self.prefill_tokens.saturating_mul(geometry.top_k * output);
        let tokens = [self.prefill_tokens.max(self.sequences), self.sequences];
        let attention = device_attention_bytes(*attention_heads, tokens, self.context, sequence_memory.widest_row);
        let of_chosen = output + 3 * size_of::<f32>() * geometry.inter;
        let chosen = (CHOICE_TOKENS * geometry.top_k).saturating_mul(of_chosen);
        let activations = layer.saturating_add(outputs).saturating_mul(2).saturating_add(attention + chosen);
        self.activation_bytes().saturating_add(activations as u64).saturating_add(DEVICE_LISTS_BYTES)
    }

    /// Bytes of KV cache in VRAM. Recurrent states are there where a chain advances them, and else in main memory.
    fn device_kv_bytes(&self) -> u64 {
        let states = self.recurrent_bytes().saturating_add(self.moving_bytes());
        self.device_page_bytes().saturating_add(states).saturating_add(self.copy_bytes())
    }
}

/// Slots in memory that experts pass through: all experts that one token uses in a layer are read at once, and
/// meanwhile the same number is being copied to the GPU or prefetched.
pub fn pass_through_slots(inputs: &PlanInputs, ahead: usize) -> usize {
    let geometry = &inputs.blueprint.geometry;
    (geometry.top_k + ahead.max(geometry.top_k)).min(geometry.experts)
}

/// Decides the plan, from the requested sizes and the available memory. In `inputs`, the resident weights are those
/// that stay in main memory, the scratch slots are [`pass_through_slots`], and keys and values [have
/// places](PlanInputs::with_kv_placed).
pub fn decide(inputs: &PlanInputs, vram: &Vram, options: &Options) -> Result<TierPlan> {
    let scope = options.cache.scope;
    let device = device_slots(inputs, vram, options, scope)?;
    let rest = inputs.slots_for(usize::MAX, scope) - device;
    let host = match (requested_slots(inputs, options), inputs.slot_budget()) {
        (Some(slots), _) => slots,
        (None, Some(budget)) => inputs.slots_in(budget, scope).min(rest),
        (None, None) => rest,
    };
    check_fits(inputs, host, scope)?;
    let plan = TierPlan {
        device_slots: device,
        host_slots: host,
        pass_through: inputs.scratch_slots,
        scope,
        embedding_bytes: None,
    };
    let left = vram.budget(options)?.saturating_sub(plan.device_bytes(inputs, vram));
    let embedding_bytes = vram.embedding_bytes.filter(|bytes| rest == 0 && *bytes <= left);
    Ok(TierPlan { embedding_bytes, ..plan })
}

/// Slots that fit into VRAM beside everything else: per layer or, in global scope, in total.
pub(super) fn slots_beside(inputs: &PlanInputs, vram: &Vram, options: &Options) -> Result<usize> {
    Ok(inputs.slots_in(vram.budget(options)?.saturating_sub(vram.base_bytes(inputs)), options.cache.scope))
}

fn device_slots(inputs: &PlanInputs, vram: &Vram, options: &Options, scope: CacheScope) -> Result<usize> {
    let budget = vram.budget(options)?;
    let available = budget.saturating_sub(vram.base_bytes(inputs));
    let fits = slots_beside(inputs, vram, options)?;
    let slots = options.device.vram_experts.map_or(fits, |per_layer| inputs.slots_for(per_layer, scope));
    let need = inputs.bytes_of_slots(slots.max(1), scope);
    if slots > 0 && need <= available {
        return Ok(slots);
    }
    let nearest = match inputs.per_layer(fits, scope) {
        0 => {
            let fits = |inputs: &PlanInputs| slots_beside(inputs, vram, options).is_ok_and(|slots| slots > 0);
            let format = inputs.with_smaller_kv().find(fits).map(|smaller| smaller.kv_format);
            let kv = format.map(|format| format!(" or {}", Setting::Kv.with(format.kind()))).unwrap_or_default();
            let with = |vram_kv_layers| PlanInputs { vram_kv_layers, ..inputs.clone() };
            let layers = (0..inputs.kv_layers_on_device()).rev().find(|layers| fits(&with(*layers)));
            let layers = layers.map(|layers| format!(" or {}", Setting::VramKv.with(layers))).unwrap_or_default();
            format!("not even one expert per layer fits; try a shorter {}{kv}{layers}", Setting::Context)
        }
        n => format!("{} {n}x fits", Setting::Vram),
    };
    bail!(
        "{} of experts do not fit beside {} into {} of memory of {}; {nearest}",
        format_bytes(need),
        vram.other_uses(inputs),
        format_bytes(budget),
        vram.name,
    )
}

impl TierPlan {
    /// VRAM that will be used, in bytes.
    pub fn device_bytes(&self, inputs: &PlanInputs, vram: &Vram) -> u64 {
        let experts = inputs.bytes_of_slots(self.device_slots, self.scope);
        vram.base_bytes(inputs) + experts + self.embedding_bytes.unwrap_or(0)
    }

    /// Main memory that will be used, in bytes.
    pub fn host_bytes(&self, inputs: &PlanInputs) -> u64 {
        self.parts(inputs).iter().map(|(_, bytes)| bytes).sum()
    }

    /// The parts of that main memory, by what they are for.
    pub fn parts(&self, inputs: &PlanInputs) -> Vec<(MemoryUse, u64)> {
        inputs.parts(self.host_expert_bytes(inputs))
    }

    /// Bytes of cached experts in main memory.
    fn host_expert_bytes(&self, inputs: &PlanInputs) -> u64 {
        inputs.bytes_of_slots(self.host_slots, self.scope)
    }

    /// The plan as text of a few lines.
    pub fn describe(&self, inputs: &PlanInputs, vram: &Vram) -> String {
        let embedding = match self.embedding_bytes {
            None | Some(0) => String::new(),
            Some(bytes) => format!(" + {} embedding", format_bytes(bytes)),
        };
        let mut text = format!(
            "plan: {} on {} = {} resident weights{embedding} + {} KV cache ({}) + {} activations + {} {}; {} free\n",
            format_bytes(self.device_bytes(inputs, vram)),
            vram.name,
            format_bytes(vram.resident_bytes),
            format_bytes(inputs.device_kv_bytes()),
            inputs.device_context_text(),
            format_bytes(inputs.device_scratch_bytes()),
            format_bytes(inputs.bytes_of_slots(self.device_slots, self.scope)),
            slots_text(inputs, self.device_slots, 0, self.scope),
            format_bytes(vram.free_bytes),
        );
        let kept = match self.host_slots {
            0 => "no cached experts".into(),
            slots => format!(
                "{} {}",
                format_bytes(inputs.bytes_of_slots(slots, self.scope)),
                slots_text(inputs, slots, 0, self.scope)
            ),
        };
        let kv = match inputs.host_kv_bytes() {
            0 => String::new(),
            bytes => format!("{} KV cache + ", format_bytes(bytes)),
        };
        text += &format!(
            "      {} of memory = {} resident weights + {kv}{}{}{} activations and staging buffers + {} for {} {} in transit + {kept}",
            format_bytes(self.host_bytes(inputs)),
            format_bytes(inputs.resident_bytes),
            DraftMemory::text(inputs.draft.as_ref()),
            VisionMemory::text(inputs.vision.as_ref()),
            format_bytes(inputs.process_and_workspace_bytes(self.host_expert_bytes(inputs))),
            format_bytes(self.pass_through as u64 * inputs.expert_sizes.largest()),
            self.pass_through,
            if self.pass_through == 1 { "expert" } else { "experts" },
        );
        if let Some(available) = inputs.available_bytes {
            text += &format!("; {} available", format_bytes(available));
        }
        text += &prefill_text(inputs);
        if self.thrashes(inputs) {
            text += "\n      warning: both tiers hold fewer experts than one token uses, so there will be almost no cache hits";
        }
        text
    }

    /// The plan as JSON.
    pub fn json(&self, inputs: &PlanInputs, vram: &Vram) -> Value {
        json!({
            "resident_bytes": inputs.resident_bytes,
            "context_tokens": inputs.context,
            "sequences": inputs.sequences,
            "context_bytes": inputs.host_kv_bytes(),
            "scratch_bytes": inputs.process_and_workspace_bytes(self.host_expert_bytes(inputs)),
            "draft": DraftMemory::json(inputs.draft.as_ref()),
            "images": VisionMemory::json(inputs.vision.as_ref()),
            "prefill_tokens": inputs.prefill_tokens,
            "expert_bytes": inputs.expert_sizes.largest(),
            "slots": self.host_slots,
            "passing_slots": self.pass_through,
            "slot_bytes": inputs.bytes_of_slots(self.host_slots, self.scope),
            "total_bytes": self.host_bytes(inputs),
            "available_bytes": inputs.available_bytes,
            "device": {
                "name": vram.name,
                "free_bytes": vram.free_bytes,
                "resident_bytes": vram.resident_bytes,
                "embedding_bytes": self.embedding_bytes,
                "context_bytes": inputs.device_kv_bytes(),
                "kv_layers": inputs.kv_layers_on_device(),
                "scratch_bytes": inputs.device_scratch_bytes(),
                "slots": self.device_slots,
                "slot_bytes": inputs.bytes_of_slots(self.device_slots, self.scope),
                "total_bytes": self.device_bytes(inputs, vram),
            },
        })
    }

    /// Whether both tiers have fewer slots than one token uses.
    fn thrashes(&self, inputs: &PlanInputs) -> bool {
        inputs.per_layer(self.device_slots + self.host_slots, self.scope) < inputs.blueprint.geometry.top_k
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::options::{CacheSize, DeviceOptions};
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, inputs, options};

    /// A GPU with this much memory beside lists, and beside what it has in reserve for them.
    pub fn vram(free: u64) -> Vram {
        let free_bytes = free + (DEVICE_LISTS_BYTES * 8).div_ceil(7);
        Vram { name: "a GPU".into(), free_bytes, resident_bytes: MEGA, embedding_bytes: None }
    }

    fn with_vram(vram_bytes: Option<u64>, vram_experts: Option<usize>, options: Options) -> Options {
        let device = DeviceOptions { vram_bytes, vram_experts, ..DeviceOptions::default() };
        Options { device, ..options }
    }

    #[test]
    fn both_tiers_are_filled_up_to_the_options() {
        let blueprint = blueprint();
        let inputs = |available| PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, available) };
        let (layer, global) = (CacheScope::Layer, CacheScope::Global);
        let (enough, tight) = (Some(beside_reserve(70 * MEGA)), Some(beside_reserve(25 * MEGA)));
        // 32 experts of 1 MiB; beside them in VRAM 1 MiB of weights, 1 MiB of KV cache, some activations, and an eighth
        // in reserve.
        let free = 24 * MEGA;
        let decided = |available, options: &Options| {
            let TierPlan { device_slots, host_slots, pass_through, .. } =
                decide(&inputs(available), &vram(free), options).unwrap();
            (device_slots, host_slots, pass_through)
        };
        assert_eq!(decided(enough, &options(CacheSize::Available, layer)), (4, 4, 4));
        assert_eq!(decided(enough, &options(CacheSize::Available, global)), (18, 14, 4));
        assert_eq!(decided(tight, &options(CacheSize::Available, layer)), (4, 2, 4));
        assert_eq!(decided(None, &options(CacheSize::ExpertsPerLayer(1), layer)), (4, 1, 4));
        assert_eq!(decided(enough, &options(CacheSize::Bytes(0), layer)), (4, 0, 4));
        assert_eq!(
            decided(
                enough,
                &with_vram(Some(10 * MEGA + DEVICE_LISTS_BYTES), None, options(CacheSize::Available, layer))
            ),
            (1, 7, 4)
        );
        assert_eq!(decided(enough, &with_vram(None, Some(3), options(CacheSize::Available, layer))), (3, 5, 4));
        let all = decide(&inputs(enough), &vram(100 * MEGA), &options(CacheSize::Available, layer)).unwrap();
        assert_eq!((all.device_slots, all.host_slots), (8, 0));
    }

    #[test]
    fn the_embedding_is_in_vram_with_all_experts_and_where_it_fits() {
        let blueprint = blueprint();
        let available = Some(beside_reserve(70 * MEGA));
        let inputs = PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, available) };
        let decided = |free, embedding_bytes, slots| {
            let vram = Vram { embedding_bytes, ..vram(free) };
            let options = with_vram(None, slots, options(CacheSize::Available, CacheScope::Layer));
            let plan = decide(&inputs, &vram, &options).unwrap();
            assert!(plan.device_bytes(&inputs, &vram) <= vram.free_bytes - vram.reserve_bytes());
            assert_eq!(plan.json(&inputs, &vram)["device"]["embedding_bytes"], json!(plan.embedding_bytes));
            (plan.device_slots, plan.embedding_bytes, plan.describe(&inputs, &vram).contains(" MB embedding"))
        };
        assert_eq!(decided(100 * MEGA, Some(5 * MEGA), None), (8, Some(5 * MEGA), true));
        assert_eq!(decided(100 * MEGA, Some(0), None), (8, Some(0), false));
        assert_eq!(decided(100 * MEGA, None, None), (8, None, false));
        assert_eq!(decided(100 * MEGA, Some(5 * MEGA), Some(7)), (7, None, false));
        assert_eq!(decided(45 * MEGA, Some(20 * MEGA), None), (8, None, false), "experts go first");
    }

    #[test]
    fn errors_name_numbers_and_a_value_that_fits() {
        let blueprint = blueprint();
        let inputs =
            PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, Some(beside_reserve(60 * MEGA))) };
        let none = || options(CacheSize::Available, CacheScope::Layer);
        let text = |free, options: &Options| decide(&inputs, &vram(free), options).unwrap_err().to_string();
        let many = text(24 * MEGA, &with_vram(None, Some(7), none()));
        assert!(many.contains("29.4 MB of experts") && many.ends_with("--vram 4x fits"), "{many}");
        assert!(text(2 * MEGA, &none()).ends_with("not even one expert per layer fits; try a shorter --context"));
        // Of 1 MiB of keys and values, q8_0 leaves a little more than half.
        let usable = vram(0).base_bytes(&inputs) + 4 * MEGA - 300_000;
        let tight = Vram { free_bytes: (usable * RESERVE_DIVISOR).div_ceil(RESERVE_DIVISOR - 1), ..vram(0) };
        let tight = decide(&inputs, &tight, &none()).unwrap_err().to_string();
        let wanted = "not even one expert per layer fits; try a shorter --context or -o kv=q8_0 or -o vram-kv=2";
        assert!(tight.ends_with(wanted), "{tight}");
        let more = text(4 * MEGA, &with_vram(Some(16 * MEGA), None, none()));
        assert_eq!(
            more,
            "--vram 16.8 MB is more than the 11.4 MB that are free on a GPU, less 1.42 MB of reserve; use at most 9.96 MB"
        );
    }

    #[test]
    fn the_text_and_the_json_have_all_numbers() {
        let blueprint = blueprint();
        let inputs =
            PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, Some(beside_reserve(60 * MEGA))) };
        let plan = decide(&inputs, &vram(24 * MEGA), &options(CacheSize::Bytes(0), CacheScope::Layer)).unwrap();
        let text = plan.describe(&inputs, &vram(24 * MEGA));
        assert!(text.contains("16 of 32 experts (50 %, 4 per layer); 32.4 MB free"), "{text}");
        assert!(text.contains("1.05 MB resident weights + 1.05 MB KV cache (1024 tokens) + "), "{text}");
        assert!(text.contains("4 experts in transit + no cached experts"), "{text}");
        let json = plan.json(&inputs, &vram(24 * MEGA));
        assert_eq!((&json["device"]["slots"], &json["device"]["context_bytes"]), (&4.into(), &MEGA.into()));
        assert_eq!(json["context_bytes"], 0);
    }
}
