//! How much of a model is on a GPU, how much in memory below it: decided before anything is loaded.

use anyhow::{Result, bail};
use larder_cache::Scope;
use serde_json::{Value, json};

use super::{Facts, asked, check_fits, held};
use crate::cli::EngineFlags;
use crate::print;

/// Left of a GPU's memory for the driver, the kernels, the scores of attention and whoever draws the screen.
const SPARE_BYTES: u64 = 256 << 20;
/// But no more than this part of what is free.
const SPARE_SHARE: u64 = 8;

/// A GPU's memory, and what of the model is always there.
pub struct Vram {
    /// The GPU's name.
    pub name: String,
    /// Bytes of its memory that are free.
    pub free: u64,
    /// Bytes of the weights of products, but for experts.
    pub resident: u64,
}

/// Slots in both memories: per layer or, in global scope, in all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiers {
    /// On the GPU.
    pub device: usize,
    /// In memory.
    pub host: usize,
    /// In memory, in all, for what passes through.
    pub passing: usize,
    /// What the first two count.
    pub scope: Scope,
}

impl Vram {
    /// Bytes that are left to others.
    fn spare(&self) -> u64 {
        SPARE_BYTES.min(self.free / SPARE_SHARE)
    }

    /// All but the experts.
    fn base(&self, facts: &Facts) -> u64 {
        self.resident + facts.remembered() + facts.scratch()
    }

    /// Bytes that may be used: those that somebody allows, but never those to spare.
    fn budget(&self, flags: &EngineFlags) -> Result<u64> {
        let most = self.free - self.spare();
        match flags.device.vram_mem {
            Some(bytes) if bytes.0 > most => bail!(
                "--vram-mem {} is more than the {} that are free on {} but for {} to spare",
                print::bytes(bytes.0),
                print::bytes(self.free),
                self.name,
                print::bytes(self.spare())
            ),
            Some(bytes) => Ok(bytes.0),
            None => Ok(most),
        }
    }

    fn beside(&self, facts: &Facts) -> String {
        format!(
            "{} of resident weights, {} for {} of context and {} of scratch",
            print::bytes(self.resident),
            print::bytes(facts.remembered()),
            facts.contexts(),
            print::bytes(facts.scratch()),
        )
    }
}

/// Slots in memory that experts pass through: all that one token of a layer can want are read at once, and as many are
/// on their way to the GPU, or are read ahead, meanwhile.
pub fn passing(facts: &Facts, ahead: usize) -> usize {
    let geometry = &facts.blueprint.geometry;
    (geometry.top_k + ahead.max(geometry.top_k)).min(geometry.experts)
}

/// Decides by what was asked for and what there is. Of `facts`, the resident weights are those that stay in memory, the
/// scratch slots are those that are [`passing`], and sequences are remembered elsewhere.
pub fn decide(facts: &Facts, vram: &Vram, flags: &EngineFlags) -> Result<Tiers> {
    let scope = flags.cache_scope.into();
    let device = on_device(facts, vram, flags, scope)?;
    let rest = facts.slots_of(usize::MAX, scope) - device;
    let host = match (asked(facts, flags), facts.room()) {
        (Some(slots), _) => slots,
        (None, Some(room)) => facts.slots_in(room, scope).min(rest),
        (None, None) => rest,
    };
    check_fits(facts, host, scope)?;
    Ok(Tiers { device, host, passing: facts.scratch_slots, scope })
}

fn on_device(facts: &Facts, vram: &Vram, flags: &EngineFlags, scope: Scope) -> Result<usize> {
    let budget = vram.budget(flags)?;
    let room = budget.saturating_sub(vram.base(facts));
    let fits = facts.slots_in(room, scope);
    let slots = flags.device.vram_experts.map_or(fits, |per_layer| facts.slots_of(per_layer, scope));
    let need = facts.bytes_of(slots.max(1), scope);
    if slots > 0 && need <= room {
        return Ok(slots);
    }
    let nearest = match facts.per_layer(fits, scope) {
        0 => "not even one expert per layer would; a shorter context or prompt leaves more".into(),
        n => format!("--vram-experts {n} would"),
    };
    bail!(
        "{} of slots do not fit beside {} into {} of memory of {}; {nearest}",
        print::bytes(need),
        vram.beside(facts),
        print::bytes(budget),
        vram.name,
    )
}

impl Tiers {
    /// Bytes that the GPU's memory will hold.
    pub fn on_device(&self, facts: &Facts, vram: &Vram) -> u64 {
        vram.base(facts) + facts.bytes_of(self.device, self.scope)
    }

    /// Bytes that memory will hold.
    pub fn in_memory(&self, facts: &Facts) -> u64 {
        facts.base() + facts.bytes_of(self.host, self.scope)
    }

    /// A few lines for a person.
    pub fn sentences(&self, facts: &Facts, vram: &Vram) -> String {
        let mut said = format!(
            "plan: {} on {} = {} resident + {} context of {} + {} scratch + {} {}; {} free\n",
            print::bytes(self.on_device(facts, vram)),
            vram.name,
            print::bytes(vram.resident),
            print::bytes(facts.remembered()),
            facts.contexts(),
            print::bytes(facts.scratch()),
            print::bytes(facts.bytes_of(self.device, self.scope)),
            held(facts, self.device, self.scope),
            print::bytes(vram.free),
        );
        let kept = match self.host {
            0 => "none kept".into(),
            slots => format!("{} {}", print::bytes(facts.bytes_of(slots, self.scope)), held(facts, slots, self.scope)),
        };
        said += &format!(
            "      {} of memory = {} resident + {} scratch and buffers + {} for {} that pass through + {kept}",
            print::bytes(self.in_memory(facts)),
            print::bytes(facts.resident),
            print::bytes(facts.scratch() + facts.buffers() + facts.process),
            print::bytes(self.passing as u64 * facts.slot),
            print::count(self.passing, "expert", "experts"),
        );
        if let Some(available) = facts.available {
            said += &format!("; {} available", print::bytes(available));
        }
        if self.thrash(facts) {
            said += "\n      warning: both together hold fewer than one token uses, so hardly any expert will be found";
        }
        said
    }

    /// The same for a program.
    pub fn json(&self, facts: &Facts, vram: &Vram) -> Value {
        json!({
            "resident_bytes": facts.resident,
            "context_tokens": facts.context,
            "sequences": facts.sequences,
            "context_bytes": facts.remembered_here(),
            "scratch_bytes": facts.scratch() + facts.buffers() + facts.process,
            "expert_bytes": facts.slot,
            "slots": self.host,
            "passing_slots": self.passing,
            "slot_bytes": facts.bytes_of(self.host, self.scope),
            "total_bytes": self.in_memory(facts),
            "available_bytes": facts.available,
            "device": {
                "name": vram.name,
                "free_bytes": vram.free,
                "resident_bytes": vram.resident,
                "context_bytes": facts.remembered(),
                "scratch_bytes": facts.scratch(),
                "slots": self.device,
                "slot_bytes": facts.bytes_of(self.device, self.scope),
                "total_bytes": self.on_device(facts, vram),
            },
        })
    }

    /// Whether one token alone needs more slots than there are.
    fn thrash(&self, facts: &Facts) -> bool {
        facts.per_layer(self.device + self.host, self.scope) < facts.blueprint.geometry.top_k
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::device::DeviceFlags;
    use crate::cli::{ByteSize, ScopeFlag};
    use crate::plan::tests::{MEGA, beside_spare, blueprint, facts, flags};

    fn vram(free: u64) -> Vram {
        Vram { name: "a GPU".into(), free, resident: MEGA }
    }

    fn asking(vram_mem: Option<u64>, vram_experts: Option<usize>, flags: EngineFlags) -> EngineFlags {
        let device = DeviceFlags { vram_mem: vram_mem.map(ByteSize), vram_experts, ..DeviceFlags::default() };
        EngineFlags { device, ..flags }
    }

    #[test]
    fn both_memories_are_filled_unless_somebody_says_how_far() {
        let blueprint = blueprint();
        let facts = |available| Facts { scratch_slots: 4, on_gpu: true, ..facts(&blueprint, available) };
        let (layer, global) = (ScopeFlag::Layer, ScopeFlag::Global);
        let (enough, tight) = (Some(beside_spare(70 * MEGA)), Some(beside_spare(25 * MEGA)));
        // 32 experts of 1 MiB; beside them on the GPU 1 MiB of weights, as much for the context, some scratch, and an eighth
        // to spare.
        let free = 24 * MEGA;
        let decided = |available, flags: &EngineFlags| {
            let Tiers { device, host, passing, .. } = decide(&facts(available), &vram(free), flags).unwrap();
            (device, host, passing)
        };
        assert_eq!(decided(enough, &flags(None, None, layer)), (4, 4, 4));
        assert_eq!(decided(enough, &flags(None, None, global)), (18, 14, 4));
        assert_eq!(decided(tight, &flags(None, None, layer)), (4, 2, 4));
        assert_eq!(decided(None, &flags(Some(1), None, layer)), (4, 1, 4));
        assert_eq!(decided(enough, &flags(None, Some(0), layer)), (4, 0, 4));
        assert_eq!(decided(enough, &asking(Some(10 * MEGA), None, flags(None, None, layer))), (1, 7, 4));
        assert_eq!(decided(enough, &asking(None, Some(3), flags(None, None, layer))), (3, 5, 4));
        let all = decide(&facts(enough), &vram(100 * MEGA), &flags(None, None, layer)).unwrap();
        assert_eq!((all.device, all.host), (8, 0));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let blueprint = blueprint();
        let facts = Facts { scratch_slots: 4, on_gpu: true, ..facts(&blueprint, Some(beside_spare(60 * MEGA))) };
        let none = || flags(None, None, ScopeFlag::Layer);
        let said = |free, flags: &EngineFlags| decide(&facts, &vram(free), flags).unwrap_err().to_string();
        let many = said(24 * MEGA, &asking(None, Some(7), none()));
        assert!(many.contains("29.4 MB of slots") && many.ends_with("--vram-experts 4 would"), "{many}");
        assert!(said(2 * MEGA, &none()).contains("not even one expert per layer"));
        let more = said(4 * MEGA, &asking(Some(8 * MEGA), None, none()));
        assert_eq!(more, "--vram-mem 8.39 MB is more than the 4.19 MB that are free on a GPU but for 524 kB to spare");
    }

    #[test]
    fn everything_is_said() {
        let blueprint = blueprint();
        let facts = Facts { scratch_slots: 4, on_gpu: true, ..facts(&blueprint, Some(beside_spare(60 * MEGA))) };
        let plan = decide(&facts, &vram(24 * MEGA), &flags(None, Some(0), ScopeFlag::Layer)).unwrap();
        let said = plan.sentences(&facts, &vram(24 * MEGA));
        assert!(said.contains("16 of 32 experts (50 %, 4 per layer); 25.2 MB free"), "{said}");
        assert!(said.contains("1.05 MB resident + 1.05 MB context of 1024 tokens + "), "{said}");
        assert!(said.contains("4 experts that pass through + none kept"), "{said}");
        let json = plan.json(&facts, &vram(24 * MEGA));
        assert_eq!((&json["device"]["slots"], &json["device"]["context_bytes"]), (&4.into(), &MEGA.into()));
        assert_eq!(json["context_bytes"], 0);
    }
}
