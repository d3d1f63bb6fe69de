//! Options of an engine: how it runs a model.

mod context_size;
mod vision;

use std::path::PathBuf;
use std::sync::Arc;

use larder_core::CacheScope;
use larder_engine::{MEASURE_EVERY, Speculation};
use larder_kernels::KernelChoice;
use larder_model::KvFormat;
use larder_os::performance_cores;
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;
use larder_store::CheckReads;
use larder_store::reader::ReaderSpec;

pub use context_size::ContextSize;
pub use vision::{VisionOptions, VisionUse};

use crate::open::OpenModel;

/// More threads would mostly wait for each other.
pub const THREADS_MAX: usize = 64;

/// How an engine runs a model.
#[derive(Clone)]
pub struct Options {
    /// Context of each sequence.
    pub context: ContextSize,
    /// Number of sequences with a KV cache at the same time.
    pub sequences: usize,
    /// Sequences that always have room for a whole context, where all sequences share the memory of KV caches; at least
    /// one.
    pub whole_contexts: usize,
    /// The most positions of a sequence that are pinned, so that it can go back to them.
    pub pins: usize,
    /// The most bytes of the KV caches of all sequences; `None` for as many as all contexts need, within
    /// [a share of memory](crate::plan).
    pub kv_limit_bytes: Option<u64>,
    /// Bytes, for each token of a context, of the texts that are tokenised at the same time while the engine runs: the
    /// memory plan counts what that takes. 0 if prompts are tokenised before.
    pub prompt_bytes_per_token: usize,
    /// Bytes that the program takes beside the engine while it runs, which the memory plan counts.
    pub program_bytes: u64,
    /// Tokens of a prompt that are computed in one step; `None` lets the memory plan decide.
    pub prefill_tokens: Option<usize>,
    /// Experts in main memory.
    pub cache: CacheOptions,
    /// How each token's experts are chosen.
    pub routing: RoutingSpec,
    /// Under a lossy strategy, one decoded token in as many is computed a second time exactly, to measure the loss.
    pub measure_every: u32,
    /// How tokens are drafted; no more than [`EngineExperts::drafting`](crate::EngineExperts::drafting) allows. The
    /// memory plan counts their logits.
    pub speculation: Speculation,
    /// A smaller model with the same vocabulary, which drafts tokens. The memory plan has all that it needs.
    pub draft: Option<Arc<OpenModel>>,
    /// Images in prompts.
    pub vision: VisionOptions,
    /// Where the routing is recorded, if it is.
    pub trace: Option<TraceOptions>,
    /// Threads, precision and memory of the CPU.
    pub compute: ComputeOptions,
    /// A GPU.
    pub device: DeviceOptions,
    /// Edge workers that compute experts as well.
    #[cfg(feature = "edge")]
    pub edge: Option<EdgeOptions>,
}

impl Default for Options {
    /// One sequence on the CPU, of as many tokens as the memory allows, with all experts in memory if they fit and else
    /// as many as fit.
    fn default() -> Self {
        Options {
            context: ContextSize::default(),
            sequences: 1,
            whole_contexts: 1,
            pins: 0,
            kv_limit_bytes: None,
            prompt_bytes_per_token: 0,
            program_bytes: 0,
            prefill_tokens: None,
            cache: CacheOptions::default(),
            routing: RoutingSpec::default(),
            measure_every: MEASURE_EVERY,
            speculation: Speculation::Off,
            draft: None,
            vision: VisionOptions::default(),
            trace: None,
            compute: ComputeOptions::default(),
            device: DeviceOptions::default(),
            #[cfg(feature = "edge")]
            edge: None,
        }
    }
}

impl Options {
    /// Bytes of memory that tokenising takes while the engine runs, for each token of a context.
    pub(crate) fn tokenising_bytes_per_token(&self) -> u64 {
        (self.prompt_bytes_per_token as u64).saturating_mul(larder_text::TOKENISING_BYTES as u64)
    }

    /// Whether edge workers compute experts as well.
    pub fn uses_edge(&self) -> bool {
        #[cfg(feature = "edge")]
        return self.edge.is_some();
        #[cfg(not(feature = "edge"))]
        false
    }
}

/// How many experts stay in main memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CacheSize {
    /// All if they fit, else as many as fit.
    #[default]
    Available,
    /// The number of experts that fit at the start, and then that which the available memory allows; fixed under lossy
    /// routing.
    Auto,
    /// All if they fit, loaded at the start and not when they are first used, else as many as fit.
    All,
    /// This number of experts per layer.
    ExpertsPerLayer(usize),
    /// The number of experts that fit into this number of bytes.
    Bytes(u64),
}

/// The expert cache in main memory.
#[derive(Clone)]
pub struct CacheOptions {
    /// How many experts stay in memory.
    pub size: CacheSize,
    /// Which experts share slots.
    pub scope: CacheScope,
    /// The eviction policy.
    pub eviction: EvictionSpec,
    /// Trained weights for the policy `learned`, instead of those in the model's folder.
    pub evictor: Option<PathBuf>,
    /// Extra slots for experts that pass through without displacing others.
    pub scratch: usize,
    /// Experts of the next layer to prefetch, by their predicted rank; 0 is off.
    pub prefetch: usize,
    /// Keep which experts are used most, beside the store, and let them be read before the first prompt. Without effect
    /// unless experts of a store are read into main memory alone, with the model's own routing.
    pub hot_set: bool,
    /// How shards are read.
    pub reader: ReaderSpec,
    /// Which reads are compared with their checksums.
    pub check_reads: CheckReads,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            size: CacheSize::default(),
            scope: CacheScope::Layer,
            eviction: EvictionSpec::default(),
            evictor: None,
            scratch: 0,
            prefetch: 0,
            hot_set: false,
            reader: ReaderSpec::default(),
            check_reads: CheckReads::default(),
        }
    }
}

/// Recording a trace of the routing.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// The file to write.
    pub path: PathBuf,
    /// Record the router logits too.
    pub logits: bool,
}

/// How the CPU computes.
#[derive(Clone, Debug)]
pub struct ComputeOptions {
    /// Compute threads, 1 to [`THREADS_MAX`].
    pub threads: usize,
    /// Pin each compute thread to a core of its own.
    pub pin: bool,
    /// The kernels of all models of this process, which are chosen when the first one starts.
    pub kernels: KernelChoice,
    /// Multiply quantised weights with f32 activations, not with activations rounded to 8 bits: slower.
    pub exact: bool,
    /// Number format of the KV cache; `None` is f16 if experts are quantised and [`Self::exact`] is off, else f32.
    pub kv: Option<KvFormat>,
    /// Lock the model's memory, so that the system does not swap it out.
    pub mlock: bool,
    /// Fewer compute threads while the machine runs on its battery; `None` for as many as otherwise.
    pub on_battery: Option<BatteryOptions>,
}

/// How the CPU computes while the machine runs on its battery.
#[derive(Clone, Debug)]
pub struct BatteryOptions {
    /// The most compute threads, at least 1.
    pub threads: usize,
    /// Folder in which the system lists power supplies, usually [`POWER_SUPPLIES`](larder_os::power::POWER_SUPPLIES).
    pub supplies: PathBuf,
}

impl Default for ComputeOptions {
    fn default() -> Self {
        ComputeOptions {
            threads: default_threads(),
            pin: false,
            kernels: KernelChoice::Auto,
            exact: false,
            kv: None,
            mlock: false,
            on_battery: None,
        }
    }
}

/// The default number of compute threads: one for each performance core, up to [`THREADS_MAX`].
pub fn default_threads() -> usize {
    performance_cores().min(THREADS_MAX)
}

/// What computes products and experts beside the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum DeviceKind {
    /// Only the CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU; needs the feature `cuda`.
    Cuda,
    /// The CPU as if it were a GPU, for tests.
    #[cfg(feature = "emulator")]
    Emulated,
}

/// A GPU, and how much of its memory is used.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceOptions {
    /// The device.
    pub kind: DeviceKind,
    /// VRAM to use at most, in bytes; `None` is all that is free.
    pub vram_bytes: Option<u64>,
    /// Experts per layer in VRAM; `None` is as many as fit.
    pub vram_experts: Option<usize>,
    /// Layers whose keys and values are in VRAM; `None` is all, or as many as leave room for experts.
    pub vram_kv_layers: Option<usize>,
    /// Whether attention over prompts is computed in half precision.
    pub flash_attention: bool,
}

/// Experts on other machines.
#[cfg(feature = "edge")]
#[derive(Clone, Debug)]
pub struct EdgeOptions {
    /// Topology file that lists the workers.
    pub topology: PathBuf,
    /// Placement file with the experts that are always computed on this machine.
    pub placement: Option<PathBuf>,
    /// Number format on the network.
    pub format: larder_edge::wire::Format,
    /// How long to wait for a worker's answer for one token before another worker is asked.
    pub deadline: std::time::Duration,
}
