//! Options of loading.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use crate::{
    CacheOptions, CacheSize, ComputeOptions, ContextSize, DeviceKind, DeviceOptions, ModelOptions, MtpUse, Notices,
    Options, THREADS_MAX,
};
use anyhow::{Context, Result, anyhow, bail};
use larder_core::{CacheScope, parse_bytes};
use larder_engine::Speculation;
use larder_model::KvFormat;
use larder_policy::eviction::{EvictionSpec, PolicyNeeds};
use larder_policy::routing::{RoutingSpec, parse_quality};
use serde::{Deserialize, Serialize};

use super::parse;

/// How a model is loaded. What is left out is as for the command `larder run`.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoadOptions {
    /// Memory for experts: bytes as in `"4G"`, or `"auto"` for what is available while it runs.
    pub cache_mem: Option<String>,
    /// Experts per layer in memory, in place of `cache-mem`.
    pub cache_experts: Option<usize>,
    /// Which experts share slots: `layer` or `global`.
    pub cache_scope: Option<String>,
    /// Extra slots for experts that pass through.
    pub cache_scratch: usize,
    /// Load all experts at the start, if they fit.
    pub preload: bool,
    /// The most tokens of prompt and answer together.
    pub context: Option<usize>,
    /// Compute threads.
    pub threads: Option<usize>,
    /// Pin each compute thread to a core of its own.
    pub pin: bool,
    /// Multiply quantised weights with f32 activations.
    pub exact: bool,
    /// Number format of the KV cache: `f32`, `f16` or `q8_0`.
    pub kv: Option<String>,
    /// A budget of output loss, or its name; see `--quality`.
    pub quality: Option<String>,
    /// A routing strategy; see `--routing`.
    pub routing: Option<String>,
    /// Under a lossy strategy, one decoded token in as many is computed a second time exactly.
    pub measure_every: Option<u32>,
    /// An eviction policy; see `--eviction`.
    pub eviction: Option<String>,
    /// Trained weights for the policy `learned`.
    pub evictor: Option<PathBuf>,
    /// Experts of the next layer to prefetch.
    pub prefetch: Option<usize>,
    /// How shards are read: `auto`, `uring` or `pread`.
    pub reader: Option<String>,
    /// Which reads are compared with their checksums: `all` or `first`.
    pub check_reads: Option<String>,
    /// Tokens of a prompt that are computed at a time.
    pub prefill_tokens: Option<usize>,
    /// How tokens are drafted: `off`, `lookup`, `mtp` or `auto`.
    pub speculate: Option<String>,
    /// Whether the model's memory is locked.
    pub mlock: bool,
    /// Run a GGUF file directly, without making a store beside it.
    pub no_store: bool,
    /// What computes beside the CPU: `cpu`, or `cuda` in builds with it.
    pub device: Option<String>,
    /// VRAM to use at most.
    pub vram_mem: Option<String>,
    /// Experts per layer in VRAM.
    pub vram_experts: Option<usize>,
    /// Layers whose keys and values are in VRAM.
    pub vram_kv: Option<usize>,
    /// Whether a GPU computes attention over prompts in half precision.
    pub flash_attn: bool,
    /// Folder of downloaded models, for models by name.
    pub models: Option<PathBuf>,
    /// The user's cache folder, where the content of GGUF files is noted.
    pub cache_folder: Option<PathBuf>,
}

impl LoadOptions {
    /// Parses a JSON object; no text is one without fields.
    pub fn from_json(json: &str) -> Result<Self> {
        parse(json, "load")
    }

    /// How the model is opened, with a receiver of notices.
    pub(crate) fn opening(&self, notices: Notices) -> Result<ModelOptions> {
        let drafts = self.routing()?.is_lossless() && self.eviction()?.needs() != PolicyNeeds::Evictor;
        let mtp = match self.speculation()? {
            Speculation::Mtp => MtpUse::Always,
            Speculation::Auto if drafts => MtpUse::IfStored,
            _ => MtpUse::Never,
        };
        let (models_folder, cache_folder) = (self.models.clone(), self.cache_folder.clone());
        let store_for_gguf = !self.no_store;
        Ok(ModelOptions { models_folder, cache_folder, store_for_gguf, mtp, notices, ..ModelOptions::default() })
    }

    /// The options of the engine.
    pub(crate) fn engine(&self) -> Result<Options> {
        let standard = Options::default();
        Ok(Options {
            context: self.context.map_or(standard.context, ContextSize::from),
            prefill_tokens: positive(self.prefill_tokens, "prefill-tokens")?,
            cache: self.cache_options()?,
            routing: self.routing()?,
            measure_every: positive(self.measure_every, "measure-every")?.unwrap_or(standard.measure_every),
            speculation: self.speculation()?,
            compute: self.compute()?,
            device: self.device()?,
            ..standard
        })
    }

    fn cache_options(&self) -> Result<CacheOptions> {
        let defaults = CacheOptions::default();
        Ok(CacheOptions {
            size: self.size()?,
            scope: self.scope()?,
            eviction: self.eviction()?,
            evictor: self.evictor.clone(),
            scratch: self.cache_scratch,
            prefetch: self.prefetch.unwrap_or(defaults.prefetch),
            preload: self.preload,
            hot_set: false,
            reader: named(&self.reader, "reader")?.unwrap_or_default(),
            check_reads: named(&self.check_reads, "check-reads")?.unwrap_or_default(),
        })
    }

    fn scope(&self) -> Result<CacheScope> {
        match self.cache_scope.as_deref() {
            None | Some("layer") => Ok(CacheScope::Layer),
            Some("global") => Ok(CacheScope::Global),
            Some(other) => bail!("cache-scope must be layer or global, not '{other}'"),
        }
    }

    fn size(&self) -> Result<CacheSize> {
        let sizes = [self.cache_mem.is_some(), self.cache_experts.is_some(), self.preload];
        if sizes.iter().filter(|is_given| **is_given).count() > 1 {
            bail!("of cache-mem, cache-experts and preload only one can be given");
        }
        Ok(match (&self.cache_mem, positive(self.cache_experts, "cache-experts")?) {
            (Some(text), _) if text == "auto" => CacheSize::Auto,
            (Some(text), _) => CacheSize::Bytes(bytes(text, "cache-mem")?),
            (None, Some(experts)) => CacheSize::ExpertsPerLayer(experts),
            (None, None) => CacheSize::Available,
        })
    }

    /// The strategy of `routing`, or the one that keeps to `quality`.
    fn routing(&self) -> Result<RoutingSpec> {
        routing_of(self.routing.as_deref(), self.quality.as_deref())
    }

    fn eviction(&self) -> Result<EvictionSpec> {
        Ok(named(&self.eviction, "eviction")?.unwrap_or_default())
    }

    fn speculation(&self) -> Result<Speculation> {
        match named(&self.speculate, "speculate")?.unwrap_or(Speculation::Auto) {
            Speculation::Draft => {
                bail!("speculate: a draft model is for the command alone; use off, lookup, mtp or auto")
            }
            other => Ok(other),
        }
    }

    fn compute(&self) -> Result<ComputeOptions> {
        let threads = self.threads.unwrap_or_else(crate::default_threads);
        if !(1..=THREADS_MAX).contains(&threads) {
            bail!("threads must be from 1 to {THREADS_MAX}");
        }
        let kv = match self.kv.as_deref() {
            None => None,
            Some("f32") => Some(KvFormat::F32),
            Some("f16") => Some(KvFormat::F16),
            Some("q8_0") => Some(KvFormat::Q8_0),
            Some(other) => bail!("kv must be f32, f16 or q8_0, not '{other}'"),
        };
        Ok(ComputeOptions { threads, pin: self.pin, exact: self.exact, kv, mlock: self.mlock, on_battery: None })
    }

    fn device(&self) -> Result<DeviceOptions> {
        let kind = match self.device.as_deref() {
            None | Some("cpu") => DeviceKind::Cpu,
            Some("cuda") => DeviceKind::Cuda,
            Some(other) => bail!("device must be cpu or cuda, not '{other}'"),
        };
        let vram_bytes = self.vram_mem.as_ref().map(|text| bytes(text, "vram-mem")).transpose()?;
        let (vram_experts, vram_kv_layers) = (self.vram_experts, self.vram_kv);
        Ok(DeviceOptions { kind, vram_bytes, vram_experts, vram_kv_layers, flash_attention: self.flash_attn })
    }
}

/// A routing strategy by its name, or the one that keeps to a budget of output loss.
pub(crate) fn routing_of(routing: Option<&str>, quality: Option<&str>) -> Result<RoutingSpec> {
    match (quality, routing) {
        (Some(_), Some(_)) => bail!("quality and routing cannot be given together"),
        (Some(quality), None) => parse_quality(quality).map_err(|e| anyhow!("quality {e}")),
        (None, Some(routing)) => routing.parse().context("routing"),
        (None, None) => Ok(RoutingSpec::default()),
    }
}

/// A value by its name.
fn named<T: FromStr<Err: Display>>(text: &Option<String>, field: &str) -> Result<Option<T>> {
    text.as_ref().map(|text| text.parse().map_err(|e| anyhow!("{field}: {e}"))).transpose()
}

fn bytes(text: &str, field: &str) -> Result<u64> {
    parse_bytes(text).map_err(|e| anyhow!("{field}: {e}"))
}

fn positive<T: PartialEq + Default>(number: Option<T>, field: &str) -> Result<Option<T>> {
    if number == Some(T::default()) {
        bail!("{field} must be at least 1");
    }
    Ok(number)
}
