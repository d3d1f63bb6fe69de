//! The flags of `larder lab`.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use larder_core::CacheScope;
use larder_lab::{MachineProfile, SweepPart};
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;

use super::output::{OutputFile, ReplaceFlag};
use super::traces::{TraceFlags, parse_range};
use super::{ByteSize, at_least_one, byte_size, heading};
use crate::models::default_model;

/// Record, generate, replay and compare routing traces
#[derive(Args)]
pub struct LabArgs {
    #[command(subcommand)]
    pub command: LabCommand,
}

#[derive(Subcommand)]
pub enum LabCommand {
    /// Import a trace from another program's format
    Import(ImportArgs),
    /// Export a trace for other programs
    Export(ExportArgs),
    /// Count which experts are used together, for `larder edge plan`
    Activations(ActivationsArgs),
    /// Generate a random trace
    Synth(SynthArgs),
    /// Replay a trace with one eviction policy
    Replay(ReplayArgs),
    /// Compare eviction policies over many cache sizes
    Sweep(LabSweepArgs),
    /// Train weights for the eviction policy learned
    Train(super::train::TrainArgs),
    /// Compare trained weights with other policies, on the same sequences
    Judge(super::train::JudgeArgs),
}

/// Import a trace from another program's format
#[derive(Args)]
pub struct ImportArgs {
    /// CSV file with the columns token, layer and expert; or a folder with index.json and a safetensors file per
    /// sequence
    pub source: PathBuf,
    /// Trace file to write
    #[arg(short, long, value_name = "FILE")]
    pub out: OutputFile,
    /// Experts per layer (default for CSV: the highest that occurs, plus 1)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub experts: Option<usize>,
    /// Leave out sequences that the source marks as repetitive
    #[arg(long)]
    pub skip_repetitive: bool,
    /// Print a summary as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// Export a trace for other programs
#[derive(Args)]
pub struct ExportArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub out: OutputFile,
    /// Format of the file
    #[arg(long, value_name = "FORMAT", default_value = "csv")]
    pub to: ExportFormat,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ExportFormat {
    /// One line per chosen expert
    Csv,
    /// libCacheSim's oracleGeneral: requests in order, each with the time of its next use
    OracleGeneral,
}

/// Count which experts are used together in the traces of a model, for `larder edge plan`
#[derive(Args)]
pub struct ActivationsArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Model of the traces: store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub out: OutputFile,
    /// Model name in the topology and the placement (default: name of the folder or file)
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Count decode steps only, and no prefill
    #[arg(long)]
    pub written: bool,
    /// Print the counts as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// Generate a random trace: in each layer the j-th most popular expert has a probability proportional to 1/(j+h)^a
#[derive(Args)]
pub struct SynthArgs {
    /// Trace file to write
    #[arg(short, long, value_name = "FILE")]
    pub out: OutputFile,
    /// Number of MoE layers
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub layers: usize,
    /// Experts per layer
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub experts: usize,
    /// Experts per token and layer
    #[arg(short = 'k', long, value_name = "N", default_value_t = 4)]
    pub top_k: usize,
    /// Tokens per sequence
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub tokens: usize,
    /// Number of sequences
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sequences: usize,
    /// Zipf exponent a; 0 makes all experts equally popular
    #[arg(long, value_name = "A", default_value_t = 0.7, allow_negative_numbers = true)]
    pub zipf_a: f64,
    /// Zipf offset h; higher values flatten the head of the distribution
    #[arg(long, value_name = "H", default_value_t = 2.0, allow_negative_numbers = true)]
    pub zipf_h: f64,
    /// Probability that an expert of the previous token is used again
    #[arg(long, value_name = "P", default_value_t = 0.3, allow_negative_numbers = true)]
    pub repeat: f64,
    /// Random seed; the same seed gives the same trace
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// Parses experts per layer, as in `16x`.
fn experts_per_layer(text: &str) -> Result<usize, String> {
    let digits = text.strip_suffix('x').ok_or_else(|| "must be slots per layer, as in 16x".to_owned())?;
    digits.parse().map_err(|_| "must be slots per layer, as in 16x".into())
}

/// How a trace is replayed.
#[derive(Args)]
#[command(next_help_heading = heading::CACHE)]
pub struct ReplayFlags {
    /// Scratch slots, shared by all layers: extra slots for experts that pass through without displacing others
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
    /// Start each sequence with the cache of the previous one, not with an empty cache
    #[arg(long, hide_short_help = true)]
    pub carry: bool,
    /// Trained weights for the policy learned
    #[arg(long, value_name = "FILE")]
    pub evictor: Option<PathBuf>,
    #[command(flatten)]
    pub profile: ProfileFlags,
}

/// A device profile, to estimate speed; used if the size of an expert is given.
#[derive(Args)]
#[command(next_help_heading = heading::SPEED)]
pub struct ProfileFlags {
    /// Size of one expert; enables the speed estimate
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub expert_bytes: Option<ByteSize>,
    /// SSD throughput per second
    #[arg(long, hide_short_help = true, value_name = "SIZE", value_parser = byte_size, default_value = "2G", requires = "expert_bytes")]
    pub ssd_rate: ByteSize,
    /// Memory bandwidth per second
    #[arg(long, hide_short_help = true, value_name = "SIZE", value_parser = byte_size, default_value = "30G", requires = "expert_bytes")]
    pub memory_rate: ByteSize,
    /// Milliseconds per token outside the experts
    #[arg(long, hide_short_help = true, value_name = "MS", default_value_t = 5.0, requires = "expert_bytes")]
    pub compute_ms: f64,
    /// Microseconds of latency per read
    #[arg(long, hide_short_help = true, value_name = "US", default_value_t = 100.0, requires = "expert_bytes")]
    pub latency_us: f64,
    /// Share of the compute time that can overlap with reads, 0 to 1
    #[arg(long, hide_short_help = true, value_name = "SHARE", default_value_t = 0.0, requires = "expert_bytes")]
    pub overlap: f64,
}

impl ProfileFlags {
    /// The profile, if the size of an expert is given.
    pub fn profile(&self) -> Result<Option<MachineProfile>, String> {
        let Some(ByteSize(bytes)) = self.expert_bytes else { return Ok(None) };
        let profile = MachineProfile {
            expert_bytes: bytes as f64,
            ssd_rate: self.ssd_rate.0 as f64,
            memory_rate: self.memory_rate.0 as f64,
            compute_s: self.compute_ms / 1e3,
            latency_s: self.latency_us / 1e6,
            overlap: self.overlap,
        };
        profile.check().map(|()| Some(profile))
    }
}

/// Replay a trace with one eviction policy
#[derive(Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Eviction policy: lru, lfu, lfru, llru, fifo, random, arc, s3fifo, lecar, marking, belady or learned
    #[arg(long, value_name = "SPEC", default_value = "lru", help_heading = heading::CACHE)]
    pub eviction: EvictionSpec,
    /// Slots per layer, as in 16x (default: a quarter of the experts)
    #[arg(long, value_name = "Nx", value_parser = experts_per_layer, help_heading = heading::CACHE)]
    pub cache: Option<usize>,
    /// With as many slots as the cache had while the trace was recorded with --cache auto
    #[arg(long, help_heading = heading::CACHE, conflicts_with_all = ["cache", "routing", "sequences"])]
    pub recorded_capacity: bool,
    /// Which experts share cache slots
    #[arg(long, value_name = "SCOPE", default_value = "layer", help_heading = heading::CACHE)]
    pub scope: ScopeFlag,
    /// Reroute the trace with this strategy, from its router logits
    #[arg(long, value_name = "SPEC", help_heading = heading::ROUTING)]
    pub routing: Option<RoutingSpec>,
    /// With --routing: write the rerouted trace to FILE
    #[arg(long, value_name = "FILE", requires = "routing", help_heading = heading::ROUTING)]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub replay: ReplayFlags,
    /// Print the counts of each layer as well
    #[arg(long, help_heading = heading::OUTPUT)]
    pub layers: bool,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Compare eviction policies over many cache sizes
#[derive(Args)]
pub struct LabSweepArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Eviction policy; can be repeated (default: all; learned only with --evictor)
    #[arg(long, value_name = "SPEC", help_heading = heading::CACHE)]
    pub eviction: Vec<EvictionSpec>,
    /// Reroute the trace with this strategy, from its router logits, and replay that as well; can be repeated
    #[arg(long, value_name = "SPEC", help_heading = heading::ROUTING)]
    pub routing: Vec<RoutingSpec>,
    /// Cache sizes in slots per layer, e.g. 4x,8x,16x (default: 1/8, 2/8, ... 8/8 of the experts)
    #[arg(long, value_name = "Nx,Nx", value_delimiter = ',', value_parser = experts_per_layer, help_heading = heading::CACHE)]
    pub cache: Vec<usize>,
    /// Which experts share cache slots
    #[arg(long, value_name = "SCOPE", default_value = "both", help_heading = heading::CACHE)]
    pub scope: ScopesFlag,
    #[command(flatten)]
    pub replay: ReplayFlags,
    /// Replay threads (default: one per CPU)
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = at_least_one, help_heading = heading::PERFORMANCE)]
    pub threads: Option<usize>,
    /// Replay a part of the scopes and sizes, as 0/4, 1/4, 2/4 or 3/4 on four machines
    #[arg(long, hide_short_help = true, value_name = "I/N", default_value = "0/1", hide_default_value = true, help_heading = heading::OUTPUT)]
    pub part: SweepPart,
    /// Write all numbers to FILE (CSV), one line per policy and cache size
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub csv: Option<OutputFile>,
    /// Write a page with plots to FILE (HTML)
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub html: Option<OutputFile>,
    #[command(flatten)]
    pub heat: HeatFlags,
    /// Print all numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
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

/// Which experts share cache slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ScopesFlag {
    /// Those of one layer
    Layer,
    /// Those of all layers
    Global,
    /// Compare both
    Both,
}

impl ScopesFlag {
    /// The scopes to replay with.
    pub fn scopes(self) -> &'static [CacheScope] {
        match self {
            ScopesFlag::Layer => &[CacheScope::Layer],
            ScopesFlag::Global => &[CacheScope::Global],
            ScopesFlag::Both => &[CacheScope::Layer, CacheScope::Global],
        }
    }
}

/// The part of a trace that is drawn as a heat map.
#[derive(Args)]
#[command(next_help_heading = heading::HEAT)]
pub struct HeatFlags {
    /// Layer to draw, counted from 0 among the MoE layers (default: the middle one)
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub heat_layer: Option<usize>,
    /// Sequence to draw, counted from 0
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 0)]
    pub heat_sequence: usize,
    /// Passes A to B-1 of the sequence (default: 72 from its middle on)
    #[arg(long, hide_short_help = true, value_name = "A..B", value_parser = parse_range)]
    pub heat_passes: Option<Range<usize>>,
    /// Eviction policies to draw
    #[arg(long, hide_short_help = true, value_name = "SPEC", default_values = ["lru", "belady"])]
    pub heat_eviction: Vec<EvictionSpec>,
    /// Slots per layer (default: a quarter of the experts)
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub heat_experts: Option<usize>,
}
