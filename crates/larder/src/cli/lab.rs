//! The flags of the lab.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use larder_core::CacheScope;
use larder_lab::MachineProfile;
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;

use super::{ByteSize, ScopeFlag, at_least_one, byte_size};
use crate::open::default_model;

/// Record, draw, replay and compare routing.
#[derive(Args)]
pub struct LabArgs {
    #[command(subcommand)]
    pub command: LabCommand,
}

#[derive(Subcommand)]
pub enum LabCommand {
    /// Make a trace from those of other programs.
    Import(ImportArgs),
    /// Write a trace for other programs.
    Export(ExportArgs),
    /// Count which experts a trace asks for together, for `larder edge plan`.
    Activations(ActivationsArgs),
    /// Draw a trace at random.
    Synth(SynthArgs),
    /// Replay a trace with one eviction policy.
    Replay(ReplayArgs),
    /// Compare eviction policies over many capacities.
    Sweep(LabSweepArgs),
    /// Make a page of what a sweep found.
    Report(LabReportArgs),
    /// Train the weights of the eviction policy `learned`.
    Train(super::train::TrainArgs),
    /// Compare trained weights with other policies, on the same sequences.
    Judge(super::train::JudgeArgs),
}

/// Make a trace from those of other programs.
#[derive(Args)]
pub struct ImportArgs {
    /// A CSV file with columns token, layer and expert, or a folder with an index.json and a safetensors file per
    /// sequence.
    pub source: PathBuf,
    /// The trace to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Experts per layer; those of a CSV file are counted unless said otherwise.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub experts: Option<usize>,
    /// Leave out sequences that the source marks as repeating themselves.
    #[arg(long)]
    pub skip_repetitive: bool,
    /// Print what it holds as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Write a trace for other programs.
#[derive(Args)]
pub struct ExportArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// In which format.
    #[arg(long, value_name = "FORMAT", default_value = "csv")]
    pub to: ExportFormat,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ExportFormat {
    /// A line for each chosen expert.
    Csv,
    /// libCacheSim's oracleGeneral: one request after the other, with the next use of each.
    OracleGeneral,
}

/// Count which experts the traces of a model ask for together, for `larder edge plan`.
#[derive(Args)]
pub struct ActivationsArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// The model that they are of: a store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// What the model is called where it is served; its own name unless said otherwise.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Count only tokens that went through the model alone, as those of an answer do and those of a prompt do not.
    #[arg(long)]
    pub written: bool,
    /// Print what was counted as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Draw a trace at random: in each layer the j-th most popular expert has a probability that goes with 1/(j+h)^a.
#[derive(Args)]
pub struct SynthArgs {
    /// The trace to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Layers that have experts.
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub layers: usize,
    /// Experts per layer.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub experts: usize,
    /// Experts per token and layer.
    #[arg(short = 'k', long, value_name = "N", default_value_t = 4)]
    pub top_k: usize,
    /// Tokens of each sequence.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub tokens: usize,
    /// Sequences.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub sequences: usize,
    /// The exponent; 0 makes all experts equally popular.
    #[arg(long, value_name = "A", default_value_t = 0.7, allow_negative_numbers = true)]
    pub zipf_a: f64,
    /// Flattens the head.
    #[arg(long, value_name = "H", default_value_t = 2.0, allow_negative_numbers = true)]
    pub zipf_h: f64,
    /// The chance that an expert of the token before is kept.
    #[arg(long, value_name = "P", default_value_t = 0.3, allow_negative_numbers = true)]
    pub repeat: f64,
    /// Repeats a trace exactly.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// Which traces, and what of them.
#[derive(Args)]
pub struct TraceFlags {
    /// Traces of one model: files of larder, or what `larder lab import` reads. Their sequences are kept apart.
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,
    /// Only these sequences, counted from 0 over all traces, the last one left out.
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    pub sequences: Option<Range<usize>>,
}

fn parse_range(text: &str) -> Result<Range<usize>, String> {
    let parts = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match parts {
        Some((a, b)) if a < b => Ok(a..b),
        _ => Err("is not of the form 0..40, the first below the second".into()),
    }
}

/// How a cache is replayed.
#[derive(Args)]
pub struct ReplayFlags {
    /// Slots that all layers share, for experts which may leave as soon as they were used.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
    /// Begin each sequence with what the one before it left, not with an empty cache.
    #[arg(long)]
    pub carry: bool,
    /// Trained weights, for the policy `learned`.
    #[arg(long, value_name = "FILE")]
    pub evictor: Option<PathBuf>,
    #[command(flatten)]
    pub profile: ProfileFlags,
}

/// A device, for which times are computed if the size of an expert is given.
#[derive(Args)]
pub struct ProfileFlags {
    /// Bytes of one expert.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub expert_bytes: Option<ByteSize>,
    /// What the SSD gives in a second.
    #[arg(long, value_name = "SIZE", value_parser = byte_size, default_value = "2G", requires = "expert_bytes")]
    pub ssd_rate: ByteSize,
    /// What memory gives in a second.
    #[arg(long, value_name = "SIZE", value_parser = byte_size, default_value = "30G", requires = "expert_bytes")]
    pub memory_rate: ByteSize,
    /// Milliseconds that a token takes beside its experts.
    #[arg(long, value_name = "MS", default_value_t = 5.0, requires = "expert_bytes")]
    pub compute_ms: f64,
    /// Microseconds until a read begins.
    #[arg(long, value_name = "US", default_value_t = 100.0, requires = "expert_bytes")]
    pub latency_us: f64,
    /// The share of computing that can pass while the SSD reads.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, requires = "expert_bytes")]
    pub overlap: f64,
}

impl ProfileFlags {
    /// The device, if its expert's size is known.
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

/// Replay a trace with one eviction policy.
#[derive(Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Who leaves when room is needed.
    #[arg(long, value_name = "SPEC", default_value = "lru")]
    pub eviction: EvictionSpec,
    /// Slots per layer; a quarter of the experts unless said otherwise.
    #[arg(long, value_name = "N")]
    pub cache_experts: Option<usize>,
    /// What shares the slots: the experts of one layer, or all.
    #[arg(long, value_name = "SCOPE", default_value = "layer")]
    pub cache_scope: ScopeFlag,
    /// Choose again by this strategy, from the router's logits in the trace.
    #[arg(long, value_name = "SPEC")]
    pub routing: Option<RoutingSpec>,
    /// With --routing: keep the new choices as a trace.
    #[arg(long, value_name = "FILE", requires = "routing")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub replay: ReplayFlags,
    /// Also print the counts of each layer.
    #[arg(long)]
    pub layers: bool,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Compare eviction policies over many capacities.
#[derive(Args)]
pub struct LabSweepArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// A policy; may be given several times. All that can be had unless said otherwise.
    #[arg(long, value_name = "SPEC")]
    pub eviction: Vec<EvictionSpec>,
    /// Choose again by this strategy, from the router's logits in the trace, and replay that beside the recorded
    /// choices; may be given several times.
    #[arg(long, value_name = "SPEC")]
    pub routing: Vec<RoutingSpec>,
    /// Slots per layer, as in 4,8,16; every eighth of the experts unless said otherwise.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub cache_experts: Vec<usize>,
    /// What shares the slots: the experts of one layer, all, or one after the other.
    #[arg(long, value_name = "SCOPE", default_value = "both")]
    pub cache_scope: ScopesFlag,
    #[command(flatten)]
    pub replay: ReplayFlags,
    /// Threads that replay; as many as there are processors unless said otherwise.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Write all numbers to FILE, a line for each policy and capacity.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write a page with plots to FILE.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    #[command(flatten)]
    pub heat: HeatFlags,
    /// Print all numbers as JSON; `larder lab report` makes a page of them.
    #[arg(long)]
    pub json: bool,
}

/// What shares the slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ScopesFlag {
    /// The experts of one layer.
    Layer,
    /// All experts.
    Global,
    /// Both are compared.
    Both,
}

impl ScopesFlag {
    /// One or two.
    pub fn scopes(self) -> &'static [CacheScope] {
        match self {
            ScopesFlag::Layer => &[CacheScope::Layer],
            ScopesFlag::Global => &[CacheScope::Global],
            ScopesFlag::Both => &[CacheScope::Layer, CacheScope::Global],
        }
    }
}

/// Make a page of what a sweep found.
#[derive(Args)]
pub struct LabReportArgs {
    /// What `larder lab sweep --json` printed.
    pub sweep: PathBuf,
    /// The page to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// The trace, to draw a layer of it pass by pass.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub heat: HeatFlags,
}

/// Which part of a trace is drawn pass by pass.
#[derive(Args)]
pub struct HeatFlags {
    /// The layer, among those that have experts; the middle one unless said otherwise.
    #[arg(long, value_name = "N")]
    pub heat_layer: Option<usize>,
    /// The sequence, counted from 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub heat_sequence: usize,
    /// The passes of that sequence; 72 from its middle on unless said otherwise.
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    pub heat_passes: Option<Range<usize>>,
    /// The policies.
    #[arg(long, value_name = "SPEC", default_values = ["lru", "belady"])]
    pub heat_eviction: Vec<EvictionSpec>,
    /// Slots per layer; a quarter of the experts unless said otherwise.
    #[arg(long, value_name = "N")]
    pub heat_experts: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_written() {
        assert_eq!(parse_range("3..40"), Ok(3..40));
        assert!(parse_range("3..3").is_err() && parse_range("3-4").is_err() && parse_range("..4").is_err());
    }
}
