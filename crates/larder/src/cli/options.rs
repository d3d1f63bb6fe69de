//! The flags, as the options of larder-runtime.

use std::sync::Arc;

use anyhow::Result;
use larder_engine::Speculation;
use larder_policy::eviction::PolicyNeeds;
use larder_runtime::{
    BatteryOptions, CacheOptions, CacheSize, ComputeOptions, ContextSize, DeviceKind, DeviceOptions, MtpUse, Options,
    TraceOptions, default_threads,
};

use super::device::{DeviceFlag, DeviceFlags};
use super::engine::{
    CacheFlags, CacheMemory, EngineFlags, HotSetFlag, HotSetFlags, PerformanceFlags, PlaceFlags, PowerFlags,
    RecordFlags, SizeFlags, SpeculateFlags,
};
use crate::models;

impl EngineFlags {
    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        self.performance.threads.unwrap_or_else(default_threads)
    }

    /// The options for one sequence with this context.
    pub fn options(&self, context: impl Into<ContextSize>) -> Options {
        let EngineFlags { size, cache, routing, record, performance, place, .. } = self;
        Options {
            context: context.into(),
            prefill_tokens: performance.prefill_tokens,
            cache: cache_options(size, cache, place, performance),
            routing: routing.spec().clone(),
            measure_every: routing.measure.measure_every,
            trace: trace_options(record),
            compute: self.compute_options(),
            device: place.device.options(),
            #[cfg(feature = "edge")]
            edge: place.edge.options(),
            ..Options::default()
        }
    }

    fn compute_options(&self) -> ComputeOptions {
        let PerformanceFlags { pin, exact, kv, mlock, .. } = self.performance;
        ComputeOptions { threads: self.threads(), pin, exact, kv: kv.map(Into::into), mlock, on_battery: None }
    }
}

fn cache_options(
    size: &SizeFlags,
    cache: &CacheFlags,
    place: &PlaceFlags,
    performance: &PerformanceFlags,
) -> CacheOptions {
    let size = match (size.experts, size.mem) {
        (Some(per_layer), _) => CacheSize::ExpertsPerLayer(per_layer),
        (None, Some(CacheMemory::Auto)) => CacheSize::Auto,
        (None, Some(CacheMemory::Size(bytes))) => CacheSize::Bytes(bytes.0),
        (None, None) => CacheSize::Available,
    };
    CacheOptions {
        size,
        scope: cache.scope.into(),
        eviction: cache.eviction.clone(),
        evictor: cache.evictor.clone(),
        scratch: cache.scratch,
        prefetch: cache.prefetch,
        preload: place.preload,
        hot_set: false,
        reader: performance.reader,
        check_reads: performance.check_reads,
    }
}

fn trace_options(record: &RecordFlags) -> Option<TraceOptions> {
    Some(TraceOptions { path: record.trace.clone()?.0, logits: record.logits })
}

impl HotSetFlags {
    /// `options` with the setting of these flags.
    pub fn set(self, options: Options) -> Options {
        let cache = CacheOptions { hot_set: self.hot_set == HotSetFlag::Auto, ..options.cache };
        Options { cache, ..options }
    }
}

impl PowerFlags {
    /// `options` with the setting of these flags.
    pub fn set(&self, options: Options) -> Options {
        let battery = |threads| BatteryOptions { threads, supplies: self.power_supplies.clone() };
        let compute = ComputeOptions { on_battery: self.threads_on_battery.map(battery), ..options.compute };
        Options { compute, ..options }
    }
}

impl SpeculateFlags {
    /// Whether the model is used with its layer for multi-token prediction: not where its tokens would not be drafted.
    pub fn mtp(&self, engine: &EngineFlags) -> MtpUse {
        let trained = engine.cache.eviction.needs() == PolicyNeeds::Evictor;
        let drafts = engine.routing.spec().is_lossless() && engine.record.trace.is_none() && !trained;
        match self.speculate {
            Speculation::Mtp => MtpUse::Always,
            Speculation::Auto if drafts => MtpUse::IfStored,
            _ => MtpUse::Never,
        }
    }

    /// `options` with the settings of these flags. A draft model is opened if it is asked for.
    pub fn set(&self, options: Options) -> Result<Options> {
        let drafts = matches!(self.speculate, Speculation::Draft | Speculation::Auto);
        let path = self.draft.as_deref().filter(|_| drafts);
        let draft = path.map(|path| models::open(path).map(Arc::new)).transpose()?;
        Ok(Options { speculation: self.speculate, draft, ..options })
    }
}

impl DeviceFlags {
    /// The device and how much of its memory is used.
    pub fn options(&self) -> DeviceOptions {
        let kind = match self.device {
            DeviceFlag::Cpu => DeviceKind::Cpu,
            DeviceFlag::Cuda => DeviceKind::Cuda,
            #[cfg(feature = "emulator")]
            DeviceFlag::Emulated => DeviceKind::Emulated,
        };
        DeviceOptions {
            kind,
            vram_bytes: self.vram_mem.map(|size| size.0),
            vram_experts: self.vram_experts,
            vram_kv_layers: self.vram_kv,
            flash_attention: self.flash_attn,
        }
    }
}

#[cfg(feature = "edge")]
impl super::edge_flags::EdgeFlags {
    /// The edge workers, if there is a topology.
    fn options(&self) -> Option<larder_runtime::EdgeOptions> {
        Some(larder_runtime::EdgeOptions {
            topology: self.topology.clone()?,
            placement: self.placement.clone(),
            format: self.format.into(),
            deadline: std::time::Duration::from_millis(self.deadline),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn options_of(flags: &[&str]) -> Options {
        let line = [&["larder", "plan"], flags].concat();
        let Command::Plan(args) = Cli::parse_from(line).command else { panic!("plan was typed") };
        args.engine.options(args.context)
    }

    #[test]
    fn without_flags_the_options_are_the_defaults() {
        let (found, default) = (options_of(&[]), Options::default());
        assert_eq!((found.context, found.sequences), (default.context, default.sequences));
        assert_eq!((found.cache.size, found.cache.scope), (default.cache.size, default.cache.scope));
        assert_eq!(found.cache.eviction.to_string(), default.cache.eviction.to_string());
        assert_eq!(
            (found.cache.reader.name, found.cache.prefetch),
            (default.cache.reader.name, default.cache.prefetch)
        );
        assert_eq!(found.cache.check_reads, default.cache.check_reads);
        assert_eq!(found.routing.to_string(), default.routing.to_string());
        assert_eq!(found.measure_every, default.measure_every);
        assert_eq!(found.device.kind, default.device.kind);
        assert_eq!((found.compute.threads, found.compute.kv), (default.compute.threads, default.compute.kv));
        assert!(found.trace.is_none() && !found.uses_edge());
    }

    #[test]
    fn sizes_become_one_choice() {
        assert_eq!(options_of(&["--cache-experts", "3"]).cache.size, CacheSize::ExpertsPerLayer(3));
        assert_eq!(options_of(&["--cache-mem", "auto"]).cache.size, CacheSize::Auto);
        assert_eq!(options_of(&["--cache-mem", "1M"]).cache.size, CacheSize::Bytes(1_000_000));
        let device = options_of(&["--device", "cuda", "--vram-mem", "2k"]).device;
        assert_eq!((device.kind, device.vram_bytes), (DeviceKind::Cuda, Some(2000)));
    }
}
