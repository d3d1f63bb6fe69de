//! The speed that a plan with a GPU promises, from the measured rates of VRAM, link, memory and SSD.

use larder_core::format_bytes;
use serde_json::{Value, json};

use super::PlanInputs;
use super::tiers::TierPlan;

/// Seconds of waiting for each layer whose attention the CPU computes: a copy, a kernel and a copy back took 14 µs on
/// an H100.
const WAIT_SECONDS: f64 = 15e-6;

/// Measured rates, in bytes per second.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TierRates {
    /// Kernels that read VRAM.
    pub vram: f64,
    /// Copies from memory to VRAM.
    pub link: f64,
    /// The CPU that reads memory.
    pub memory: f64,
    /// Reads of experts from the SSD.
    pub ssd: f64,
}

/// What a decoded token reads, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeBytes {
    /// Resident weights.
    pub resident: u64,
    /// Experts.
    pub experts: u64,
}

/// The speed of decoding one sequence, at the end of its context.
#[derive(Clone, PartialEq, Debug)]
pub struct ExpectedSpeed {
    /// Tokens per second if the experts of every token are on the GPU.
    pub all_on_gpu: f64,
    /// Tokens per second if every expert is as likely as any other.
    pub even: f64,
    /// The part of a token's experts that is found on the GPU, in memory and on the SSD then.
    pub shares: [f64; 3],
    /// What takes the most time then.
    pub limit: &'static str,
    bytes: DecodeBytes,
    /// Bytes of keys and values, in VRAM and in memory, of how many tokens.
    kv: ([u64; 2], usize),
}

impl TierPlan {
    /// The speed that these rates allow. Experts in different places are read at the same time; resident weights, and
    /// the keys and values of a whole context, are read before them, those in memory by the CPU. Launches and other
    /// waits come on top.
    pub fn expected_speed(&self, inputs: &PlanInputs, bytes: DecodeBytes, rates: &TierRates) -> ExpectedSpeed {
        let all = inputs.slots_for(usize::MAX, self.scope) as f64;
        let on_gpu = (self.device_slots as f64 / all).min(1.0);
        let in_memory = (self.host_slots as f64 / all).min(1.0 - on_gpu);
        let shares = [on_gpu, in_memory, 1.0 - on_gpu - in_memory];
        // An expert in memory is copied to the GPU or computed by the CPU, whichever is faster.
        let places = [("VRAM", rates.vram), ("memory", rates.link.max(rates.memory)), ("the SSD", rates.ssd)];
        let kv = inputs.kv_bytes_of_context();
        let [on_device, on_host] = kv.map(|bytes| bytes as f64);
        let host_layers = inputs.blueprint.kv_layers.len() - inputs.kv_layers_on_device();
        let attending = on_host / rates.memory + host_layers as f64 * WAIT_SECONDS;
        let resident = (bytes.resident as f64 + on_device) / rates.vram + attending;
        let experts = bytes.experts as f64;
        let seconds = shares.iter().zip(places).map(|(share, (place, rate))| (place, share * experts / rate));
        let (limit, longest) = seconds.max_by(|(_, a), (_, b)| a.total_cmp(b)).expect("there are three places");
        let all_on_gpu = 1.0 / (resident + experts / rates.vram);
        ExpectedSpeed { all_on_gpu, even: 1.0 / (resident + longest), shares, limit, bytes, kv: (kv, inputs.context) }
    }
}

impl ExpectedSpeed {
    /// The speed as text of two lines.
    pub fn describe(&self) -> String {
        let ExpectedSpeed { all_on_gpu, even, shares, limit, bytes, kv: (kv, context) } = self;
        let [on_gpu, in_memory, on_ssd] = shares.map(|share| 100.0 * share);
        let all = kv.iter().sum::<u64>();
        let split = if kv[1] > 0 { format!(", {} in memory", format_bytes(kv[1])) } else { String::new() };
        format!(
            "at most {all_on_gpu:.1} tokens/s, if the experts of a token are on the GPU ({} per token, {} of them keys and values of \
             {context} tokens{split})\n\
             about {even:.1} tokens/s if every expert is as likely as any other, limited by {limit}: {on_gpu:.0} % of them on the GPU, \
             {in_memory:.0} % in memory, {on_ssd:.0} % on the SSD ({} per token)",
            format_bytes(bytes.resident + bytes.experts + all),
            format_bytes(all),
            format_bytes(bytes.experts),
        )
    }

    /// The speed as JSON.
    pub fn json(&self) -> Value {
        let [on_gpu, in_memory, on_ssd] = self.shares;
        json!({
            "tokens_per_second_all_on_gpu": self.all_on_gpu,
            "tokens_per_second_even": self.even,
            "limit": self.limit,
            "share_on_gpu": on_gpu,
            "share_in_memory": in_memory,
            "share_on_ssd": on_ssd,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use larder_core::CacheScope;

    use super::*;
    use crate::plan::tests::{blueprint, inputs};

    use crate::plan::tests::MEGA;

    pub const RATES: TierRates = TierRates { vram: 1e12, link: 2e10, memory: 5e10, ssd: 2e9 };
    pub const BYTES: DecodeBytes = DecodeBytes { resident: 1_000_000_000, experts: 1_000_000_000 };

    fn speed(device_slots: usize, host_slots: usize, rates: &TierRates) -> ExpectedSpeed {
        let blueprint = blueprint();
        let plan =
            TierPlan { device_slots, host_slots, pass_through: 4, scope: CacheScope::Layer, embedding_bytes: None };
        let inputs = PlanInputs { on_gpu: true, ..inputs(&blueprint, None) };
        plan.expected_speed(&inputs, BYTES, rates)
    }

    #[test]
    fn the_slowest_place_limits() {
        // Eight experts per layer.
        let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} instead of {b}");
        let all = speed(8, 0, &RATES);
        // Beside the weights a token reads the keys and values of 1024 tokens.
        let resident = 0.001 + MEGA as f64 / 1e12;
        near(all.even, 1.0 / (resident + 0.001));
        assert_eq!((all.even, all.limit, all.shares), (all.all_on_gpu, "VRAM", [1.0, 0.0, 0.0]));
        let two = speed(2, 6, &RATES);
        near(two.even, 1.0 / (resident + 0.75 * 0.02));
        assert_eq!((two.limit, two.shares), ("memory", [0.25, 0.75, 0.0]));
        // The link is used where it is faster than the CPU.
        near(speed(2, 6, &TierRates { memory: 1e10, ..RATES }).even, 1.0 / (resident + 0.75 * 0.05));
        let three = speed(2, 5, &RATES);
        near(three.even, 1.0 / (resident + 0.125 * 0.5));
        assert_eq!(three.limit, "the SSD");
    }

    #[test]
    fn text_and_json_have_the_shares() {
        let found = speed(2, 5, &RATES);
        let text = found.describe();
        assert!(
            text.starts_with("at most 499.7 tokens/s, if the experts of a token are on the GPU (2.00 GB per token, 1.05 MB of them keys"),
            "{text}"
        );
        assert!(
            text.contains("limited by the SSD: 25 % of them on the GPU, 62 % in memory, 12 % on the SSD"),
            "{text}"
        );
        assert_eq!((&found.json()["limit"], &found.json()["share_on_gpu"]), (&"the SSD".into(), &0.25.into()));
    }
}
