//! The limits of the machine, measured in the same run as what they are compared with.

use std::sync::Arc;

use anyhow::Result;
use larder_cache::Traffic;
use larder_cache::two_tiers::TierTraffic;
use larder_runtime::machine::rates;
use larder_runtime::{OnGpu, OpenModel, Options, expert_sizes};
use larder_store::Store;
use serde_json::{Value, json};

use crate::print;
use crate::run_report::RunReport;
use crate::telemetry::Totals;

/// Throughput of the machine in bytes per second, measured in this run.
pub struct Limits {
    memory: f64,
    /// In reads of one expert; `None` without a store.
    pub ssd: Option<f64>,
    /// Of clearing memory when it is first touched.
    pub clearing: f64,
    pub gpu: Option<OnGpu>,
    /// Bytes of the resident weights that every token reads.
    resident: f64,
    /// Bytes of one expert, on average over the layers.
    expert: f64,
    /// Number of experts that every token uses, over all layers.
    experts: f64,
}

impl Limits {
    pub fn measure(model: &OpenModel, options: &Options) -> Result<Self> {
        let ssd = |store: &Arc<Store>| rates::ssd_throughput(store, &options.cache.reader).map(|ssd| ssd.rate);
        let geometry = &model.blueprint.geometry;
        Ok(Limits {
            memory: rates::memory_bandwidth(options.compute.threads)?,
            ssd: model.store().map(ssd).transpose()?,
            clearing: rates::clearing_rate()?,
            gpu: None,
            resident: model.resident_bytes_per_token()? as f64,
            expert: expert_sizes(model)?.mean() as f64,
            experts: (geometry.top_k * geometry.moe_layers.len()) as f64,
        })
    }

    /// Bytes that every token reads, from any tier.
    fn bytes_per_token(&self) -> f64 {
        self.resident + self.experts * self.expert
    }

    /// The shortest time in seconds in which memory provides the weights of `steps` steps that want `experts` experts
    /// in all, whatever the number of tokens in each.
    pub fn step_seconds(&self, steps: usize, experts: usize) -> f64 {
        (steps as f64 * self.resident + experts as f64 * self.expert) / self.memory
    }

    /// The shortest time in seconds that decode could have taken on each link, by the link's name.
    pub fn least_seconds(&self, run: &RunReport) -> Vec<(&'static str, f64)> {
        let Totals { tokens, traffic, .. } = run.decode;
        let ssd = self.ssd.map(|rate| ("SSD", traffic.bytes() as f64 / rate));
        let (Some(gpu), Some(tiers)) = (self.gpu, traffic.tiers) else {
            let memory = tokens as f64 * self.bytes_per_token() / self.memory;
            return [("memory", memory)].into_iter().chain(ssd).collect();
        };
        self.tier_seconds(&gpu, &tiers, tokens).into_iter().chain(ssd).collect()
    }

    /// The shortest times of steps with this traffic on each link of a GPU.
    fn tier_seconds(&self, gpu: &OnGpu, tiers: &TierTraffic, steps: usize) -> [(&'static str, f64); 4] {
        let on_gpu = steps as f64 * gpu.resident_bytes as f64 + tiers.on_device as f64 * self.expert;
        [
            ("VRAM", on_gpu / gpu.throughput.vram),
            ("to the GPU", tiers.to_device_bytes as f64 / gpu.throughput.link_in),
            ("from the GPU", tiers.from_device_bytes as f64 / gpu.throughput.link_out),
            ("memory", tiers.on_host as f64 * self.expert / self.memory),
        ]
    }

    /// As [`least_seconds`](Self::least_seconds), of steps of several sequences; without the SSD, and `None` without a
    /// GPU.
    pub fn device_seconds(&self, traffic: &Traffic, steps: usize) -> Option<[(&'static str, f64); 4]> {
        Some(self.tier_seconds(self.gpu.as_ref()?, traffic.tiers.as_ref()?, steps))
    }

    /// The link with the longest of these times: the bottleneck.
    pub fn slowest(&self, run: &RunReport) -> (&'static str, f64) {
        let least = self.least_seconds(run);
        least.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("memory is always measured")
    }

    pub fn describe(&self) -> String {
        let per_second = |rate: f64| format!("{}/s", print::bytes(rate as u64));
        let (memory, clearing) = (per_second(self.memory), per_second(self.clearing));
        let mut text = format!("limits: memory {memory}, {clearing} when it is first touched");
        if let Some(OnGpu { throughput, .. }) = self.gpu {
            let [vram, to, from] = [throughput.vram, throughput.link_in, throughput.link_out].map(per_second);
            text += &format!(", VRAM {vram}, to the GPU {to}, from the GPU {from}");
        }
        if let Some(rate) = self.ssd {
            text += &format!(", SSD {} in reads of one expert", per_second(rate));
        }
        text
    }

    pub fn json(&self) -> Value {
        json!({
            "memory_bytes_per_second": self.memory,
            "ssd_bytes_per_second": self.ssd,
            "clearing_bytes_per_second": self.clearing,
            "bytes_touched_per_token": self.bytes_per_token(),
            "gpu": self.gpu.map(|gpu| json!({
                "vram_bytes_per_second": gpu.throughput.vram,
                "to_gpu_bytes_per_second": gpu.throughput.link_in,
                "from_gpu_bytes_per_second": gpu.throughput.link_out,
                "resident_bytes": gpu.resident_bytes,
            })),
        })
    }
}
