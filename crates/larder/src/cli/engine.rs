//! The flags of commands that run a model.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_cache::CacheScope;
use larder_engine::{MEASURE_EVERY, Speculation};
use larder_model::KvFormat;
use larder_os::power::POWER_SUPPLIES;
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::{RoutingSpec, parse_quality};
use larder_runtime::THREADS_MAX;
use larder_store::CheckReads;
use larder_store::reader::ReaderSpec;

use super::device::DeviceFlags;
#[cfg(feature = "edge")]
use super::edge_flags::EdgeFlags;
use super::output::{OutputFile, ReplaceFlag};
use super::{ByteSize, at_least_one, byte_size, heading};

/// How the engine runs. A command that does not take a group of these flags, because it sets those values itself, has
/// [`NoFlags`] in its place; [`EngineFlags::full`] fills in the defaults.
#[derive(Args, Clone)]
pub struct EngineFlags<Size = SizeFlags, Routing = RoutingFlags, Record = RecordFlags, Place = PlaceFlags>
where
    Size: Args,
    Routing: Args,
    Record: Args,
    Place: Args,
{
    /// Run a GGUF file directly, without making a store beside it
    #[arg(long, help_heading = heading::MODEL)]
    pub no_store: bool,
    #[command(flatten)]
    pub size: Size,
    #[command(flatten)]
    pub cache: CacheFlags,
    #[command(flatten)]
    pub routing: Routing,
    #[command(flatten)]
    pub record: Record,
    #[command(flatten)]
    pub performance: PerformanceFlags,
    #[command(flatten)]
    pub place: Place,
}

/// Of commands that record no trace.
pub type UntracedFlags = EngineFlags<SizeFlags, RoutingFlags, NoFlags>;
/// Of commands that choose the routing strategy themselves.
pub type FixedRoutingFlags = EngineFlags<SizeFlags, NoFlags, NoFlags>;
/// Of commands that choose the routing strategy and, for each store, the size of the cache.
pub type FixedSizeFlags = EngineFlags<DefaultSizeFlags, NoFlags, NoFlags>;
/// Of commands that choose the routing strategy and try several sizes of the cache on the CPU.
pub type CpuOnlyFlags = EngineFlags<NoFlags, NoFlags, NoFlags, NoFlags>;

impl<Size, Routing, Record, Place> EngineFlags<Size, Routing, Record, Place>
where
    Size: Args + Clone + Into<SizeFlags>,
    Routing: Args + Clone + Into<RoutingFlags>,
    Record: Args + Clone + Into<RecordFlags>,
    Place: Args + Clone + Into<PlaceFlags>,
{
    /// All groups, those that the command does not take with their defaults.
    pub fn full(&self) -> EngineFlags {
        EngineFlags {
            no_store: self.no_store,
            size: self.size.clone().into(),
            cache: self.cache.clone(),
            routing: self.routing.clone().into(),
            record: self.record.clone().into(),
            performance: self.performance.clone(),
            place: self.place.clone().into(),
        }
    }
}

/// A group of flags that a command does not take. It is no clap group, because a command may lack several.
#[derive(Args, Clone, Copy, Default)]
#[group(skip)]
pub struct NoFlags {}

impl From<NoFlags> for SizeFlags {
    fn from(_: NoFlags) -> Self {
        SizeFlags::default()
    }
}

impl From<NoFlags> for RoutingFlags {
    fn from(_: NoFlags) -> Self {
        RoutingFlags::default()
    }
}

impl From<NoFlags> for RecordFlags {
    fn from(_: NoFlags) -> Self {
        RecordFlags::default()
    }
}

impl From<NoFlags> for PlaceFlags {
    fn from(_: NoFlags) -> Self {
        PlaceFlags::default()
    }
}

/// How many experts stay in memory.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::CACHE)]
pub struct SizeFlags {
    /// Experts per layer to keep in memory; the others are read from the store
    #[arg(long = "cache-experts", value_name = "N", id = "cache_experts", value_parser = at_least_one)]
    #[arg(conflicts_with = "preload")]
    pub experts: Option<usize>,
    /// Memory for cached experts, e.g. 4G, 512M or 1.5GiB, or auto: as much as is available, also later (default: all experts if
    /// they fit, else as many as fit at the start)
    #[arg(long = "cache-mem", value_name = "SIZE", id = "cache_mem", value_parser = cache_memory)]
    #[arg(conflicts_with_all = ["cache_experts", "preload"])]
    pub mem: Option<CacheMemory>,
}

/// Memory for cached experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheMemory {
    /// What is available, while the model runs.
    Auto,
    /// A fixed size.
    Size(ByteSize),
}

/// Parses a size in bytes, or `auto`.
fn cache_memory(text: &str) -> Result<CacheMemory, String> {
    match text {
        "auto" => Ok(CacheMemory::Auto),
        size => byte_size(size).map(CacheMemory::Size),
    }
}

/// How many experts stay in memory, where the command's arguments may say it for each store.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::CACHE)]
pub struct DefaultSizeFlags {
    /// Experts per layer to keep in memory, of stores without =N (default: half of them)
    #[arg(long = "cache-experts", value_name = "N", id = "cache_experts", value_parser = at_least_one)]
    #[arg(conflicts_with = "preload")]
    pub experts: Option<usize>,
}

impl From<DefaultSizeFlags> for SizeFlags {
    fn from(flags: DefaultSizeFlags) -> Self {
        SizeFlags { experts: flags.experts, mem: None }
    }
}

/// How the cache works.
#[derive(Args, Clone)]
#[command(next_help_heading = heading::CACHE)]
pub struct CacheFlags {
    /// Which experts share cache slots
    #[arg(long = "cache-scope", value_name = "SCOPE", id = "cache_scope", default_value = "layer")]
    pub scope: ScopeFlag,
    /// Cache eviction policy: lru, lfu, lfru, llru, fifo, random, arc, s3fifo, lecar, marking or learned; with options as
    /// in random:seed=7
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub eviction: EvictionSpec,
    /// Trained weights for --eviction learned (default: evictor.safetensors in the store)
    #[arg(long, value_name = "FILE")]
    pub evictor: Option<PathBuf>,
    /// Scratch slots: extra slots for experts that pass through without displacing others
    #[arg(long = "cache-scratch", value_name = "N", id = "cache_scratch", default_value_t = 0)]
    pub scratch: usize,
    /// Prefetch the N experts that the next layer will most likely use, or off
    #[arg(long, value_name = "off|N", default_value = "off", value_parser = parse_prefetch)]
    pub prefetch: usize,
}

/// What runs for people keep of earlier ones.
#[derive(Args, Clone, Copy)]
pub struct HotSetFlags {
    /// Keep which experts are used most, beside the store, and read them while no prompt is there: auto or off
    #[arg(long, value_name = "WHEN", default_value = "auto", hide_possible_values = true, help_heading = heading::CACHE)]
    pub hot_set: HotSetFlag,
}

/// The power supply, for commands that generate text for people.
#[derive(Args, Clone)]
pub struct PowerFlags {
    /// Compute threads while the machine runs on its battery (default: as many as otherwise); the text stays the same
    #[arg(long, value_name = "N", value_parser = parse_threads, help_heading = heading::PERFORMANCE)]
    pub threads_on_battery: Option<usize>,
    /// Folder in which the system lists power supplies
    #[arg(long, value_name = "FOLDER", default_value = POWER_SUPPLIES, hide = true)]
    pub power_supplies: PathBuf,
}

/// Speculation, of commands that generate text for people.
#[derive(Args, Clone)]
pub struct SpeculateFlags {
    /// Speculative decoding, which leaves the text the same: several tokens are drafted and then computed in one step. Off, lookup:
    /// those that followed the same words earlier (prompt lookup), draft: those of --draft, mtp: those that the model's own layer for
    /// multi-token prediction predicts, or auto: all of them while they save time
    #[arg(long, value_name = "HOW", default_value_t = Speculation::Auto, help_heading = heading::PERFORMANCE)]
    pub speculate: Speculation,
    /// Draft model: a smaller model with the same tokenizer, which is loaded into memory; with --speculate draft or auto
    #[arg(long, value_name = "STORE", help_heading = heading::PERFORMANCE)]
    pub draft: Option<PathBuf>,
}

/// When the hot set is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum HotSetFlag {
    /// Where experts are read from a store into main memory, with the model's own routing
    Auto,
    /// Never
    Off,
}

/// How each token's experts are chosen.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::ROUTING)]
pub struct RoutingFlags {
    /// Routing strategy: original, or one that prefers cached experts and may change the text: prior:lambda=0.2,
    /// prior:budget=0.01, max-rank:m=8, cumsum:p=0.9, prune:h=4; and rules for experts that are not in memory, alone or joined by +:
    /// light:tau=0.05 leaves those of little weight out, shelf:tau=0.15 reads their smaller copies
    #[arg(long = "routing", value_name = "STRATEGY", id = "routing", default_value = "original")]
    pub strategy: RoutingSpec,
    /// Read as little as this loss of the output allows: the mean KL divergence from the model's own output in nats per token, as in
    /// 0.01, or light (0.005), balanced (0.01) or fast (0.02); off is exact. Needs the calibration of `larder tune`
    #[arg(long, value_name = "LOSS", value_parser = parse_quality, conflicts_with = "routing")]
    pub quality: Option<RoutingSpec>,
    #[command(flatten)]
    pub measure: MeasureFlag,
}

impl RoutingFlags {
    /// The strategy: that of --routing, or the one that keeps to --quality.
    pub fn spec(&self) -> &RoutingSpec {
        self.quality.as_ref().unwrap_or(&self.strategy)
    }
}

/// How often the loss of outputs is measured.
#[derive(Args, Clone)]
#[command(next_help_heading = heading::ROUTING)]
pub struct MeasureFlag {
    /// Under a strategy that may change the text: decode one token in N a second time exactly, and print how far its output is
    /// from the model's own
    #[arg(long, value_name = "N", default_value_t = MEASURE_EVERY, value_parser = clap::value_parser!(u32).range(1..))]
    pub measure_every: u32,
}

impl Default for MeasureFlag {
    fn default() -> Self {
        MeasureFlag { measure_every: MEASURE_EVERY }
    }
}

/// Recording a trace.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::ROUTING)]
pub struct RecordFlags {
    /// Record each token's experts to FILE, for `larder lab`
    #[arg(long = "trace", value_name = "FILE", id = "trace")]
    pub trace: Option<OutputFile>,
    /// With --trace: record the router logits too
    #[arg(long = "trace-logits", id = "trace_logits", requires = "trace")]
    pub logits: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// How fast, and with how much precision.
#[derive(Args, Clone)]
#[command(next_help_heading = heading::PERFORMANCE)]
pub struct PerformanceFlags {
    /// How shards are read: auto, uring or pread
    #[arg(long, value_name = "READER", default_value_t)]
    pub reader: ReaderSpec,
    /// Which reads are compared with their checksums: all, or only the first of each expert, which overlooks bytes that the
    /// disk returns wrong later
    #[arg(long, value_name = "READS", default_value = "all")]
    pub check_reads: CheckReads,
    /// Compute threads (default: all performance cores)
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Tokens of a prompt that are computed at a time: more read less and take more memory (default: as many as an eighth of
    /// the memory for experts has room for, 256 to 4096, or 128 where memory is short)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub prefill_tokens: Option<usize>,
    /// Pin each compute thread to a core of its own
    #[arg(long)]
    pub pin: bool,
    /// Multiply quantised weights with f32 activations, not with activations rounded to 8 bits: slower
    #[arg(long)]
    pub exact: bool,
    /// Number format of the KV cache (default: f16 if experts are quantised and --exact is absent, else f32)
    #[arg(long, value_name = "FORMAT")]
    pub kv: Option<KvFlag>,
    /// Lock the model's memory, so that the system does not swap it out
    #[arg(long)]
    pub mlock: bool,
    #[command(flatten)]
    pub timeline: TimelineFlags,
}

/// A timeline of the run.
#[derive(Args, Clone)]
pub struct TimelineFlags {
    /// Write a timeline of steps, layers, products, reads and waits to FILE, for Perfetto or chrome://tracing; a file that exists
    /// is replaced
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// With --profile: the bytes after which the timeline ends
    #[arg(long, value_name = "SIZE", value_parser = byte_size, default_value = "1G", requires = "profile")]
    pub profile_max: ByteSize,
}

/// What computes experts, and when they are loaded.
#[derive(Args, Clone, Default)]
pub struct PlaceFlags {
    /// Load all experts at start-up, if they fit (default: load each when it is first used)
    #[arg(long, help_heading = heading::CACHE)]
    pub preload: bool,
    #[command(flatten)]
    pub device: DeviceFlags,
    #[cfg(feature = "edge")]
    #[command(flatten)]
    pub edge: EdgeFlags,
}

/// Parses a number of compute threads.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        n if n > THREADS_MAX => Err(format!("must be at most {THREADS_MAX}")),
        n => Ok(n),
    }
}

fn parse_prefetch(text: &str) -> Result<usize, String> {
    match text {
        "off" => Ok(0),
        n => n.parse().map_err(|_| "must be off or a number".into()),
    }
}

/// Number format of the KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum KvFlag {
    /// Exact
    F32,
    /// Half the memory, rounded
    F16,
    /// A quarter of the memory, rounded to eight bits: changes the text
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<KvFlag> for KvFormat {
    fn from(flag: KvFlag) -> Self {
        match flag {
            KvFlag::F32 => KvFormat::F32,
            KvFlag::F16 => KvFormat::F16,
            KvFlag::Q8_0 => KvFormat::Q8_0,
        }
    }
}

/// Which experts share cache slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ScopeFlag {
    /// Those of one layer
    Layer,
    /// Those of all layers
    Global,
}

impl From<ScopeFlag> for CacheScope {
    fn from(flag: ScopeFlag) -> Self {
        match flag {
            ScopeFlag::Layer => CacheScope::Layer,
            ScopeFlag::Global => CacheScope::Global,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    use crate::cli::Cli;

    /// The flags of a command, by its names.
    fn flags_of(path: &[&str]) -> Vec<String> {
        let command = path.iter().fold(Cli::command(), |command: Command, name| {
            command.find_subcommand(name).unwrap_or_else(|| panic!("there is a command {name}")).clone()
        });
        command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned)).collect()
    }

    #[test]
    fn commands_do_not_take_flags_that_they_would_refuse() {
        for (path, refused) in [
            (&["serve"][..], &["trace", "trace-logits"][..]),
            (&["report"], &["trace", "trace-logits", "routing", "cache-mem"]),
            (&["eval", "sensitivity"], &["trace", "routing"]),
            (&["eval", "optimal"], &["trace", "routing"]),
            (&["tune"], &["trace", "routing"]),
            (&["eval", "sweep"], &["trace", "routing", "cache-experts", "cache-mem", "preload", "device", "edge"]),
        ] {
            let all = flags_of(path);
            assert!(all.iter().any(|flag| flag == "eviction"), "{path:?}");
            for flag in refused {
                assert!(!all.iter().any(|f| f == flag), "{path:?} takes --{flag}");
            }
        }
        assert!(flags_of(&["run"]).iter().any(|flag| flag == "trace"));
    }
}
