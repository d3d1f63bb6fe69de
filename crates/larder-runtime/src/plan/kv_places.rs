//! Where keys and values are with a GPU: those of some layers in VRAM, those with a sliding window first, and those of
//! the others in main memory, where the CPU computes their attention. And what another format or another split of them
//! would change.

use larder_core::SequenceMemory;
use larder_model::KvFormat;
use serde_json::{Value, json};

use super::tier_speed::{DecodeBytes, ExpectedSpeed, TierRates};
use super::tiers::{TierPlan, Vram, decide, slots_beside};
use super::{PlanInputs, slot_count};
use crate::notices::Setting;
use crate::options::Options;

/// Another split is proposed if it promises more than this many times the speed.
const WORTH_SPLITTING: f64 = 1.02;

impl<'a> PlanInputs<'a> {
    /// The same inputs with keys and values in VRAM as the options say; without an option those of as many layers as
    /// leave room in VRAM for the experts that the options ask for, or for those of a token, or at least for one per
    /// layer.
    pub fn with_kv_placed(self, vram: &Vram, options: &Options) -> Self {
        let all = self.blueprint.kv_layers.len();
        let wanted = options.device.vram_experts;
        let geometry = &self.blueprint.geometry;
        let leaves = |layers: usize, experts: usize| {
            let inputs = PlanInputs { vram_kv_layers: layers, ..self.clone() };
            let slots = slots_beside(&inputs, vram, options);
            slots.is_ok_and(|slots| inputs.per_layer(slots, options.cache.scope) >= experts.min(geometry.experts))
        };
        let most = |experts: usize| (0..=all).rev().find(|layers| leaves(*layers, experts));
        let layers = match options.device.vram_kv_layers {
            Some(layers) => layers.min(all),
            None => most(wanted.unwrap_or(geometry.top_k)).or_else(|| most(1)).unwrap_or(0),
        };
        PlanInputs { vram_kv_layers: layers, ..self }
    }

    /// The same inputs with keys and values in smaller formats.
    pub(super) fn with_smaller_kv(&self) -> impl Iterator<Item = PlanInputs<'a>> {
        let with = |kv_format| PlanInputs { kv_format, ..self.clone() };
        let smaller = [KvFormat::F16, KvFormat::Q8_0].map(with).into_iter();
        smaller.filter(|other| other.page_bytes() < self.page_bytes())
    }

    /// Bytes of the keys and values that a token reads at the end of the context: in VRAM, and in main memory. Those of
    /// layers that can be in main memory only are left out.
    pub(super) fn kv_bytes_of_context(&self) -> [u64; 2] {
        let (there, here) = self.blueprint.kv_layers.split_at(self.kv_layers_on_device());
        let of = |layer: &SequenceMemory| layer.read_bytes(self.context, self.kv_format.kind());
        [there, here].map(|layers| layers.iter().map(of).fold(0, u64::saturating_add))
    }

    /// The layers whose keys and values are in VRAM.
    pub fn kv_layers_on_device(&self) -> usize {
        if self.on_gpu { self.vram_kv_layers.min(self.blueprint.kv_layers.len()) } else { 0 }
    }

    /// The most bytes of the keys and values of all sequences, in whole pages.
    pub(super) fn page_bytes(&self) -> u64 {
        let kind = self.kv_format.kind();
        let one = self.blueprint.sequence_memory.kv_bytes(self.context, self.prefill_tokens, kind);
        one.saturating_mul(self.sequences as u64)
    }

    /// The most bytes of the keys and values of all sequences in VRAM, in whole pages.
    pub(super) fn device_page_bytes(&self) -> u64 {
        let of = self.blueprint.kv_layers[..self.kv_layers_on_device()].iter();
        let bytes = |layer: &SequenceMemory| layer.kv_bytes(self.context, self.prefill_tokens, self.kv_format.kind());
        let one = of.map(bytes).fold(0, u64::saturating_add);
        one.saturating_mul(self.sequences as u64)
    }

    /// As [`device_page_bytes`](Self::device_page_bytes), in main memory.
    pub(super) fn host_page_bytes(&self) -> u64 {
        self.page_bytes().saturating_sub(self.device_page_bytes())
    }

    /// The context, and of how many layers it has keys and values in VRAM if not of all.
    pub(super) fn device_context_text(&self) -> String {
        let (here, all) = (self.kv_layers_on_device(), self.blueprint.kv_layers.len());
        let layers = if here < all { format!(", {here} of {all} layers") } else { String::new() };
        self.context_text() + &layers
    }
}

/// What a plan changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KvChange {
    /// Another format, which rounds keys and values.
    Format(KvFormat),
    /// Another number of layers with keys and values in VRAM, of this many.
    Layers(usize, usize),
}

/// A plan with keys and values in another format or another place, which leave room for more experts.
#[derive(Clone, PartialEq, Debug)]
pub struct OtherKv {
    change: KvChange,
    plan: TierPlan,
    speed: ExpectedSpeed,
    /// Experts on the GPU: without the change, and with it.
    experts: [usize; 2],
}

/// A plan, and what it was made from.
pub struct Planned<'a, 'b> {
    /// The plan.
    pub plan: &'a TierPlan,
    /// Its inputs.
    pub inputs: &'a PlanInputs<'b>,
    /// The GPU.
    pub vram: &'a Vram,
    /// The options.
    pub options: &'a Options,
    /// What a token reads.
    pub bytes: DecodeBytes,
    /// Measured rates.
    pub rates: &'a TierRates,
}

impl Planned<'_, '_> {
    /// The speed of the plan.
    pub fn speed(&self) -> ExpectedSpeed {
        self.plan.expected_speed(self.inputs, self.bytes, self.rates)
    }

    /// The plans with smaller formats.
    pub fn smaller_kv(&self) -> Vec<OtherKv> {
        let with = |inputs: PlanInputs| {
            let format = inputs.kv_format;
            self.with(KvChange::Format(format), &inputs.with_kv_placed(self.vram, self.options))
        };
        self.inputs.with_smaller_kv().filter_map(with).collect()
    }

    /// The plan with the best split of experts, keys and values between VRAM and memory, if it promises more speed.
    pub fn better_split(&self) -> Option<OtherKv> {
        let all = self.inputs.blueprint.kv_layers.len();
        let with = |layers| {
            let inputs = PlanInputs { vram_kv_layers: layers, ..self.inputs.clone() };
            self.with(KvChange::Layers(layers, all), &inputs)
        };
        let best = (0..=all).filter_map(with).max_by(|a, b| a.speed.even.total_cmp(&b.speed.even));
        best.filter(|best| best.speed.even > WORTH_SPLITTING * self.speed().even)
    }

    fn with(&self, change: KvChange, inputs: &PlanInputs) -> Option<OtherKv> {
        let other = decide(inputs, self.vram, self.options).ok()?;
        let speed = other.expected_speed(inputs, self.bytes, self.rates);
        let experts =
            [self.plan, &other].map(|plan| slot_count(&inputs.blueprint.geometry, plan.device_slots, plan.scope));
        Some(OtherKv { change, plan: other, speed, experts })
    }
}

impl OtherKv {
    /// The plan as a line of text, beside the speed without it.
    pub fn describe(&self, without: &ExpectedSpeed) -> String {
        let OtherKv { change, speed, experts: [before, after], .. } = self;
        let change = match change {
            KvChange::Format(format) => format!("{}, which rounds keys and values", Setting::Kv.with(format.kind())),
            KvChange::Layers(layers, all) => {
                format!("{}, the keys and values of {layers} of {all} layers on the GPU", Setting::VramKv.with(layers))
            }
        };
        let experts =
            if before == after { String::new() } else { format!("{after} instead of {before} experts on the GPU, ") };
        let (after, before) = (speed.even, without.even);
        format!("with {change}: {experts}about {after:.1} instead of {before:.1} tokens/s")
    }

    /// The plan as JSON.
    pub fn json(&self) -> Value {
        let (slots, expected) = (self.plan.device_slots, self.speed.json());
        match self.change {
            KvChange::Format(format) => json!({ "kv": format.kind().name(), "slots": slots, "expected": expected }),
            KvChange::Layers(layers, _) => json!({ "vram_kv": layers, "slots": slots, "expected": expected }),
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_cache::CacheScope;

    use super::*;
    use crate::options::{CacheSize, DeviceOptions};
    use crate::plan::tests::{MEGA, beside_reserve, blueprint, inputs, options};
    use crate::plan::tier_speed::tests::{BYTES, RATES};
    use crate::plan::tiers::tests::vram;

    #[test]
    fn smaller_keys_and_values_leave_room_for_experts() {
        let blueprint = blueprint();
        // 8 MiB of keys and values in f16, 4.25 in q8_0.
        let inputs = PlanInputs { context: 8192, scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, None) };
        let (vram, options) = (vram(24 * MEGA), options(CacheSize::Bytes(0), CacheScope::Layer));
        let plan = &decide(&inputs, &vram, &options).unwrap();
        let planned = Planned { plan, inputs: &inputs, vram: &vram, options: &options, bytes: BYTES, rates: &RATES };
        let (speed, smaller) = (planned.speed(), planned.smaller_kv());
        let [only] = &smaller[..] else { panic!("only q8_0 is smaller than f16: {smaller:?}") };
        assert_eq!((only.change, only.experts), (KvChange::Format(KvFormat::Q8_0), [8, 12]));
        assert!(only.speed.even > 1.1 * speed.even, "{smaller:?} beside {speed:?}");
        let text = only.describe(&speed);
        assert!(
            text.contains("with -o kv=q8_0, which rounds keys and values: 12 instead of 8 experts on the GPU"),
            "{text}"
        );
        assert_eq!((&only.json()["kv"], &only.json()["slots"]), (&"q8_0".into(), &3.into()));
    }

    #[test]
    fn keys_and_values_that_do_not_fit_beside_experts_are_in_memory() {
        let blueprint = blueprint();
        let of = |megas: u64, vram_experts, vram_kv_layers| {
            let device = DeviceOptions { vram_experts, vram_kv_layers, ..DeviceOptions::default() };
            let options = Options { device, ..options(CacheSize::Bytes(0), CacheScope::Layer) };
            // 8 MiB of keys and values in four layers, 4 MiB of one expert in each, and 1 MiB of weights.
            let inputs = PlanInputs { context: 8192, scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, None) };
            let vram = vram(megas * MEGA * 8 / 7);
            let placed = inputs.with_kv_placed(&vram, &options);
            let experts = decide(&placed, &vram, &options).map(|plan| plan.device_slots).ok();
            let [device, host] = placed.kv_bytes_of_context().map(|bytes| bytes / MEGA);
            assert_eq!(device + host, 8);
            (placed.kv_layers_on_device(), device, experts)
        };
        assert_eq!(of(24, None, None), (4, 8, Some(3)));
        assert_eq!(of(14, None, None), (2, 4, Some(2)), "there is room for the experts of a token");
        assert_eq!(of(14, Some(1), None), (4, 8, Some(1)), "unless fewer are asked for");
        assert_eq!(of(12, None, None), (1, 2, Some(2)));
        assert_eq!(of(6, None, None), (0, 0, Some(1)));
        assert_eq!(of(4, None, None), (0, 0, None), "nothing fits");
        assert_eq!(of(24, None, Some(1)), (1, 2, Some(5)));
        assert_eq!(of(24, None, Some(9)), (4, 8, Some(3)));
    }

    #[test]
    fn the_best_split_has_keys_and_values_where_they_cost_least() {
        let blueprint = blueprint();
        let split = |vram_megas: u64| {
            let available = beside_reserve(40 * MEGA);
            let inputs =
                PlanInputs { context: 8192, scratch_slots: 4, on_gpu: true, ..inputs(&blueprint, Some(available)) };
            let (vram, options) = (vram(vram_megas * MEGA), options(CacheSize::Available, CacheScope::Layer));
            let plan = &decide(&inputs, &vram, &options).unwrap();
            let (inputs, vram, options) = (&inputs, &vram, &options);
            let planned = Planned { plan, inputs, vram, options, bytes: BYTES, rates: &RATES };
            planned.better_split().map(|best| best.describe(&planned.speed()))
        };
        // Memory has room, and the SSD is slow: experts should have the VRAM.
        let best = split(24).expect("a better split");
        assert!(
            best.starts_with("with -o vram-kv=1, the keys and values of 1 of 4 layers on the GPU: 16 instead of 8"),
            "{best}"
        );
        assert_eq!(split(100), None, "all is in VRAM");
    }
}
