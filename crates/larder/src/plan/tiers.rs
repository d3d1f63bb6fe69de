//! How much of a model is on a GPU, how much in memory below it: decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::CacheScope;
use serde_json::{Value, json};

use super::{PlanInputs, check_fits, requested_slots, slots_text};
use crate::cli::EngineFlags;
use crate::print;

/// Left of a GPU's memory for the driver, the kernels, the scores of attention and whoever draws the screen.
const RESERVE_BYTES: u64 = 256 << 20;
/// But no more than this part of what is free.
const RESERVE_DIVISOR: u64 = 8;

/// A GPU's memory, and what of the model is always there.
pub struct Vram {
    /// The GPU's name.
    pub name: String,
    /// Bytes of its memory that are free.
    pub free_bytes: u64,
    /// Bytes of the weights of products, but for experts.
    pub resident_bytes: u64,
}

/// Slots in both memories: per layer or, in global scope, in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierPlan {
    /// On the GPU.
    pub device_slots: usize,
    /// In memory.
    pub host_slots: usize,
    /// In memory, in all, for what passes through.
    pub pass_through: usize,
    /// What the first two count.
    pub scope: CacheScope,
}

impl Vram {
    /// Bytes that are left to others.
    fn reserve_bytes(&self) -> u64 {
        RESERVE_BYTES.min(self.free_bytes / RESERVE_DIVISOR)
    }

    /// All but the experts.
    fn base_bytes(&self, inputs: &PlanInputs) -> u64 {
        self.resident_bytes + inputs.kv_bytes() + inputs.scratch_bytes()
    }

    /// Bytes that may be used: those that somebody allows, but never those to spare.
    fn budget(&self, flags: &EngineFlags) -> Result<u64> {
        let most = self.free_bytes - self.reserve_bytes();
        match flags.device.vram_mem {
            Some(bytes) if bytes.0 > most => bail!(
                "--vram-mem {} is more than the {} that are free on {} but for {} to spare",
                print::bytes(bytes.0),
                print::bytes(self.free_bytes),
                self.name,
                print::bytes(self.reserve_bytes())
            ),
            Some(bytes) => Ok(bytes.0),
            None => Ok(most),
        }
    }

    fn other_uses(&self, inputs: &PlanInputs) -> String {
        format!(
            "{} of resident weights, {} for {} of context and {} of scratch",
            print::bytes(self.resident_bytes),
            print::bytes(inputs.kv_bytes()),
            inputs.context_text(),
            print::bytes(inputs.scratch_bytes()),
        )
    }
}

/// Slots in memory that experts pass through: all that one token of a layer can want are read at once, and as many are
/// on their way to the GPU, or are read ahead, meanwhile.
pub fn pass_through_slots(inputs: &PlanInputs, ahead: usize) -> usize {
    let geometry = &inputs.blueprint.geometry;
    (geometry.top_k + ahead.max(geometry.top_k)).min(geometry.experts)
}

/// Decides by what was asked for and what there is. Of `inputs`, the resident weights are those that stay in memory, the
/// scratch slots are those that are [`pass_through_slots`], and sequences are remembered elsewhere.
pub fn decide(inputs: &PlanInputs, vram: &Vram, flags: &EngineFlags) -> Result<TierPlan> {
    let scope = flags.cache_scope.into();
    let device = device_slots(inputs, vram, flags, scope)?;
    let rest = inputs.slots_for(usize::MAX, scope) - device;
    let host = match (requested_slots(inputs, flags), inputs.slot_budget()) {
        (Some(slots), _) => slots,
        (None, Some(room)) => inputs.slots_in(room, scope).min(rest),
        (None, None) => rest,
    };
    check_fits(inputs, host, scope)?;
    Ok(TierPlan { device_slots: device, host_slots: host, pass_through: inputs.scratch_slots, scope })
}

fn device_slots(inputs: &PlanInputs, vram: &Vram, flags: &EngineFlags, scope: CacheScope) -> Result<usize> {
    let budget = vram.budget(flags)?;
    let room = budget.saturating_sub(vram.base_bytes(inputs));
    let fits = inputs.slots_in(room, scope);
    let slots = flags.device.vram_experts.map_or(fits, |per_layer| inputs.slots_for(per_layer, scope));
    let need = inputs.bytes_of_slots(slots.max(1), scope);
    if slots > 0 && need <= room {
        return Ok(slots);
    }
    let nearest = match inputs.per_layer(fits, scope) {
        0 => "not even one expert per layer would; a shorter context or prompt leaves more".into(),
        n => format!("--vram-experts {n} would"),
    };
    bail!(
        "{} of slots do not fit beside {} into {} of memory of {}; {nearest}",
        print::bytes(need),
        vram.other_uses(inputs),
        print::bytes(budget),
        vram.name,
    )
}

impl TierPlan {
    /// Bytes that the GPU's memory will hold.
    pub fn device_bytes(&self, inputs: &PlanInputs, vram: &Vram) -> u64 {
        vram.base_bytes(inputs) + inputs.bytes_of_slots(self.device_slots, self.scope)
    }

    /// Bytes that memory will hold.
    pub fn host_bytes(&self, inputs: &PlanInputs) -> u64 {
        inputs.base_bytes() + inputs.bytes_of_slots(self.host_slots, self.scope)
    }

    /// A few lines for a person.
    pub fn describe(&self, inputs: &PlanInputs, vram: &Vram) -> String {
        let mut said = format!(
            "plan: {} on {} = {} resident + {} context of {} + {} scratch + {} {}; {} free\n",
            print::bytes(self.device_bytes(inputs, vram)),
            vram.name,
            print::bytes(vram.resident_bytes),
            print::bytes(inputs.kv_bytes()),
            inputs.context_text(),
            print::bytes(inputs.scratch_bytes()),
            print::bytes(inputs.bytes_of_slots(self.device_slots, self.scope)),
            slots_text(inputs, self.device_slots, self.scope),
            print::bytes(vram.free_bytes),
        );
        let kept = match self.host_slots {
            0 => "none kept".into(),
            slots => format!(
                "{} {}",
                print::bytes(inputs.bytes_of_slots(slots, self.scope)),
                slots_text(inputs, slots, self.scope)
            ),
        };
        said += &format!(
            "      {} of memory = {} resident + {} scratch and buffers + {} for {} that pass through + {kept}",
            print::bytes(self.host_bytes(inputs)),
            print::bytes(inputs.resident_bytes),
            print::bytes(inputs.scratch_bytes() + inputs.gpu_buffer_bytes() + inputs.process_bytes),
            print::bytes(self.pass_through as u64 * inputs.slot_bytes),
            print::count(self.pass_through, "expert", "experts"),
        );
        if let Some(available) = inputs.available_bytes {
            said += &format!("; {} available", print::bytes(available));
        }
        if self.thrashes(inputs) {
            said += "\n      warning: both together hold fewer than one token uses, so hardly any expert will be found";
        }
        said
    }

    /// The same for a program.
    pub fn json(&self, inputs: &PlanInputs, vram: &Vram) -> Value {
        json!({
            "resident_bytes": inputs.resident_bytes,
            "context_tokens": inputs.context,
            "sequences": inputs.sequences,
            "context_bytes": inputs.host_kv_bytes(),
            "scratch_bytes": inputs.scratch_bytes() + inputs.gpu_buffer_bytes() + inputs.process_bytes,
            "expert_bytes": inputs.slot_bytes,
            "slots": self.host_slots,
            "passing_slots": self.pass_through,
            "slot_bytes": inputs.bytes_of_slots(self.host_slots, self.scope),
            "total_bytes": self.host_bytes(inputs),
            "available_bytes": inputs.available_bytes,
            "device": {
                "name": vram.name,
                "free_bytes": vram.free_bytes,
                "resident_bytes": vram.resident_bytes,
                "context_bytes": inputs.kv_bytes(),
                "scratch_bytes": inputs.scratch_bytes(),
                "slots": self.device_slots,
                "slot_bytes": inputs.bytes_of_slots(self.device_slots, self.scope),
                "total_bytes": self.device_bytes(inputs, vram),
            },
        })
    }

    /// Whether one token alone needs more slots than there are.
    fn thrashes(&self, inputs: &PlanInputs) -> bool {
        inputs.per_layer(self.device_slots + self.host_slots, self.scope) < inputs.blueprint.geometry.top_k
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::device::DeviceFlags;
    use crate::cli::{ByteSize, ScopeFlag};
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, flags, inputs};

    fn vram(free: u64) -> Vram {
        Vram { name: "a GPU".into(), free_bytes: free, resident_bytes: MEGA }
    }

    fn asking(vram_mem: Option<u64>, vram_experts: Option<usize>, flags: EngineFlags) -> EngineFlags {
        let device = DeviceFlags { vram_mem: vram_mem.map(ByteSize), vram_experts, ..DeviceFlags::default() };
        EngineFlags { device, ..flags }
    }

    #[test]
    fn both_memories_are_filled_unless_somebody_says_how_far() {
        let blueprint = blueprint();
        let inputs = |available| PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, available) };
        let (layer, global) = (ScopeFlag::Layer, ScopeFlag::Global);
        let (enough, tight) = (Some(beside_reserve(70 * MEGA)), Some(beside_reserve(25 * MEGA)));
        // 32 experts of 1 MiB; beside them on the GPU 1 MiB of weights, as much for the context, some scratch, and an eighth
        // to spare.
        let free = 24 * MEGA;
        let decided = |available, flags: &EngineFlags| {
            let TierPlan { device_slots, host_slots, pass_through, .. } =
                decide(&inputs(available), &vram(free), flags).unwrap();
            (device_slots, host_slots, pass_through)
        };
        assert_eq!(decided(enough, &flags(None, None, layer)), (4, 4, 4));
        assert_eq!(decided(enough, &flags(None, None, global)), (18, 14, 4));
        assert_eq!(decided(tight, &flags(None, None, layer)), (4, 2, 4));
        assert_eq!(decided(None, &flags(Some(1), None, layer)), (4, 1, 4));
        assert_eq!(decided(enough, &flags(None, Some(0), layer)), (4, 0, 4));
        assert_eq!(decided(enough, &asking(Some(10 * MEGA), None, flags(None, None, layer))), (1, 7, 4));
        assert_eq!(decided(enough, &asking(None, Some(3), flags(None, None, layer))), (3, 5, 4));
        let all = decide(&inputs(enough), &vram(100 * MEGA), &flags(None, None, layer)).unwrap();
        assert_eq!((all.device_slots, all.host_slots), (8, 0));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let blueprint = blueprint();
        let inputs =
            PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, Some(beside_reserve(60 * MEGA))) };
        let none = || flags(None, None, ScopeFlag::Layer);
        let said = |free, flags: &EngineFlags| decide(&inputs, &vram(free), flags).unwrap_err().to_string();
        let many = said(24 * MEGA, &asking(None, Some(7), none()));
        assert!(many.contains("29.4 MB of slots") && many.ends_with("--vram-experts 4 would"), "{many}");
        assert!(said(2 * MEGA, &none()).contains("not even one expert per layer"));
        let more = said(4 * MEGA, &asking(Some(8 * MEGA), None, none()));
        assert_eq!(more, "--vram-mem 8.39 MB is more than the 4.19 MB that are free on a GPU but for 524 kB to spare");
    }

    #[test]
    fn everything_is_said() {
        let blueprint = blueprint();
        let inputs =
            PlanInputs { scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, Some(beside_reserve(60 * MEGA))) };
        let plan = decide(&inputs, &vram(24 * MEGA), &flags(None, Some(0), ScopeFlag::Layer)).unwrap();
        let said = plan.describe(&inputs, &vram(24 * MEGA));
        assert!(said.contains("16 of 32 experts (50 %, 4 per layer); 25.2 MB free"), "{said}");
        assert!(said.contains("1.05 MB resident + 1.05 MB context of 1024 tokens + "), "{said}");
        assert!(said.contains("4 experts that pass through + none kept"), "{said}");
        let json = plan.json(&inputs, &vram(24 * MEGA));
        assert_eq!((&json["device"]["slots"], &json["device"]["context_bytes"]), (&4.into(), &MEGA.into()));
        assert_eq!(json["context_bytes"], 0);
    }
}
