//! The flags, as typed. Their doc comments are the help.

use std::path::PathBuf;

use clap::{Arg, ArgAction, Args, Parser, Subcommand, ValueEnum};
use larder_core::{NumberFormat, parse_bytes};
use larder_engine::{SamplerError, Sampling};
use larder_store::{MtpTensors, SourceOptions};
use larder_text::{ContextFull, GenerationConfig};

use crate::models::default_model;

pub mod bits;
pub mod chat;
pub mod edge;
#[cfg(feature = "edge")]
pub mod edge_worker;
pub mod engine;
pub mod eval;
mod format;
mod ignore_config;
pub mod imatrix;
pub mod lab;
#[cfg(feature = "serve")]
pub mod launch;
pub mod machine;
pub mod output;
pub mod prove;
pub mod renamed;
#[cfg(feature = "serve")]
pub mod serve;
pub mod store;
mod stored_as;
pub mod traces;
pub mod train;
pub mod tune;
pub mod words;

pub use chat::ThinkingFlag;
pub use engine::{EngineFlags, RecordFlags, TimelineFlags, takes};
pub use format::FormatFlag;
pub use ignore_config::IgnoreConfig;
use output::OutputFile;
pub use stored_as::StoredAs;
use stored_as::parse_stored_as;

/// Headings of the help. A command lists them in the order in which its flags first use them.
pub mod heading {
    pub const MODEL: &str = "Model";
    pub const PROMPT: &str = "Model and prompt";
    pub const SAMPLING: &str = "Sampling";
    #[cfg(any(feature = "serve", feature = "edge"))]
    pub const SERVER: &str = "Server";
    pub const TEXT: &str = "Text";
    pub const ENGINE: &str = "Memory and speed";
    pub const CACHE: &str = "Expert cache";
    pub const ROUTING: &str = "Routing";
    pub const PERFORMANCE: &str = "Performance";
    pub const SPEED: &str = "Speed estimate";
    pub const HEAT: &str = "Heat map";
    pub const OUTPUT: &str = "Output";
}

/// A size in bytes, as typed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

/// Parses a size in bytes, with a unit or without.
pub fn byte_size(text: &str) -> Result<ByteSize, String> {
    parse_bytes(text).map(ByteSize)
}

/// Runs Mixture-of-Experts language models that are larger than memory
#[derive(Parser)]
#[command(name = "larder", version, long_version = env!("LARDER_BUILD_VERSION"), propagate_version = true)]
#[command(max_term_width = 100, disable_help_flag = true, args(help_flags()))]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// `--help` with the flags that a person needs, and `--help-all`.
fn help_flags() -> [Arg; 2] {
    let short = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort).help("Print help");
    let all =
        Arg::new("help_all").long("help-all").action(ArgAction::HelpLong).help("Print help on all flags and settings");
    [short.global(true), all.global(true)]
}

#[derive(Subcommand)]
pub enum Command {
    /// Convert a checkpoint folder or a GGUF file to a store
    Convert(ConvertArgs),
    /// Measure an importance matrix on a text, for convert --imatrix and for llama.cpp
    Imatrix(imatrix::ImatrixArgs),
    /// Check every byte of a store against its checksums
    Verify(store::VerifyArgs),
    /// Maintain a store
    Store(store::StoreArgs),
    /// Show what a model consists of and how many of its experts fit in how much memory
    Inspect(InspectArgs),
    /// Generate text from a prompt
    Run(Box<RunArgs>),
    /// Chat with a model in the terminal
    Chat(Box<chat::ChatArgs>),
    /// Serve an OpenAI-compatible HTTP API and a chat page
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    /// Start a coding agent with a model of this machine, and a server for it if none runs
    #[cfg(feature = "serve")]
    Launch(launch::LaunchArgs),
    /// Show memory use and estimated speed limits
    Plan(Box<PlanArgs>),
    /// Measure prefill and decode speed, next to the limits that memory and SSD set
    Bench(Box<BenchArgs>),
    /// Prove that threads, caches, batches, readers and instruction sets change no bit of what a model computes
    Prove(Box<prove::ProveArgs>),
    /// Compare routing strategies over many runs, and print a report to share
    Report(Box<machine::ReportArgs>),
    /// Write logits and routing of given tokens to a file, to check numerics
    Logits(Box<LogitsArgs>),
    /// Tokenize a text or chat messages
    Tokenize(TokenizeArgs),
    /// Evaluate a model, and what cache-aware routing costs it
    Eval(Box<eval::EvalArgs>),
    /// Measure what each way to read fewer experts costs and saves, for --quality
    Tune(Box<tune::TuneArgs>),
    /// Record, generate, replay and compare routing traces
    Lab(Box<lab::LabArgs>),
    /// Run a model's experts on several machines
    Edge(edge::EdgeArgs),
    /// Check this machine and suggest improvements
    Doctor(Box<machine::DoctorArgs>),
    /// Download a model from the Hugging Face hub, or go on with a download
    #[command(visible_alias = "get")]
    Pull(machine::PullArgs),
    /// List downloaded models with their size on disk and whether they are complete
    #[command(visible_alias = "ls")]
    List(machine::ListModelsArgs),
    /// Remove a downloaded model
    #[command(visible_alias = "remove")]
    Rm(machine::RemoveModelArgs),
    /// List, locate and remove downloaded models
    Models(machine::ModelsArgs),
    /// Show settings and where they come from
    Config(machine::ConfigArgs),
    /// Print a shell completion script
    Completions(machine::CompletionsArgs),
    /// Print the manual page, or write one for each command
    Man(machine::ManArgs),
}

/// Convert a checkpoint folder or a GGUF file to a store
#[derive(Args)]
pub struct ConvertArgs {
    /// Checkpoint folder from the Hugging Face hub, .gguf file, or model name on the hub (org/name)
    pub source: PathBuf,
    /// Folder of the new store; an interrupted conversion continues where it stopped
    pub store: PathBuf,
    /// Number format of the experts, such as q8_0, q4_k or mxfp4, or keep
    #[arg(long, default_value = "keep", value_name = "FORMAT", value_parser = parse_stored_as)]
    pub experts: StoredAs,
    /// Number format of the resident weight matrices, or keep
    #[arg(long, default_value = "keep", value_name = "FORMAT", value_parser = parse_stored_as)]
    pub resident: StoredAs,
    /// File with a number format per matrix: a line has a pattern and a format, such as `layers.0.experts.* q8_0`; the
    /// first that matches counts, and --experts and --resident where none does
    #[arg(long, value_name = "FILE")]
    pub mix: Option<PathBuf>,
    /// Importance matrix in GGUF, as llama.cpp writes it: what is rounded is rounded so that the columns that matter to
    /// the model have small errors, at the cost of others
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    #[command(flatten)]
    pub bits: bits::BitsFlags,
    /// Also write a second, smaller copy of every expert, in this format: --routing shelf:tau=… reads it for missing
    /// experts of little weight
    #[arg(long = "shelf", alias = "small-copy", value_name = "FORMAT")]
    pub small_copy: Option<NumberFormat>,
    /// Also write a second copy of every expert to FOLDER, on another drive: reads go to both drives, and one may fail.
    /// With a store that is finished, only what is missing there is copied
    #[arg(long, value_name = "FOLDER", conflicts_with = "stripe")]
    pub also: Option<PathBuf>,
    /// Write every other expert to FOLDER, on another drive, instead of to the store. Experts of a store that is
    /// finished are moved there
    #[arg(long, value_name = "FOLDER")]
    pub stripe: Option<PathBuf>,
    /// Also keep the model's layer for multi-token prediction, for --speculate mtp and auto
    #[arg(long)]
    pub mtp: bool,
    /// GGUF file with the image tower, in place of the model's own or of that beside a GGUF file
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

impl ConvertArgs {
    /// How the source is opened.
    pub fn opening(&self) -> SourceOptions {
        let mtp = if self.mtp { MtpTensors::Kept } else { MtpTensors::LeftOut };
        SourceOptions { mtp, ignored_keys: self.ignore_config.keys.clone() }
    }
}

/// Show what a model consists of and how many of its experts fit in how much memory
#[derive(Args)]
pub struct InspectArgs {
    /// Store, checkpoint folder or .gguf file
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Print the numbers as JSON
    #[arg(long)]
    pub json: bool,
}

/// Generate text from a prompt
#[derive(Args)]
#[command(args(words::model_and_prompt()))]
pub struct RunArgs {
    /// Store, checkpoint folder, .gguf file or name (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::PROMPT)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Prompt text; - reads standard input
    #[arg(id = "prompt_text", short, long = "prompt", value_name = "TEXT", help_heading = heading::PROMPT)]
    pub prompt: Option<String>,
    /// Show the picture in FILE (PNG, JPEG, WebP or GIF) before the prompt, in the chat template; can be repeated
    #[arg(long, value_name = "FILE", help_heading = heading::PROMPT)]
    pub image: Vec<PathBuf>,
    /// Put the prompt into the model's chat template, as a user message
    #[arg(long, hide_short_help = true, help_heading = heading::PROMPT)]
    pub chat: bool,
    /// System message before the prompt; implies --chat
    #[arg(long, value_name = "TEXT", help_heading = heading::PROMPT)]
    pub system: Option<String>,
    /// Maximum number of tokens to generate
    #[arg(short = 'n', long, default_value_t = 256, value_name = "N", help_heading = heading::SAMPLING)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub seed: SeedFlag,
    /// Stop string: end the text before it; can be repeated
    #[arg(long, value_name = "TEXT", help_heading = heading::SAMPLING)]
    pub stop: Vec<String>,
    /// Continue past the model's end-of-text token
    #[arg(long, hide_short_help = true, help_heading = heading::SAMPLING)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub format: FormatFlag,
    #[command(flatten)]
    pub engine: EngineFlags,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Write times and cache counters of each step, which computes a token or several, to FILE (CSV)
    #[arg(long, value_name = "FILE", hide_short_help = true, help_heading = heading::OUTPUT)]
    pub telemetry: Option<OutputFile>,
    /// Print one JSON object instead of the text
    #[arg(long, help_heading = None)]
    pub json: bool,
}

/// Show memory use and estimated speed limits
#[derive(Args)]
pub struct PlanArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::PLAN }>,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Measure prefill and decode speed, next to the limits that memory and SSD set
#[derive(Args)]
pub struct BenchArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Prompt length in tokens, which are drawn at random
    #[arg(short, long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub prompt: usize,
    /// Number of tokens to generate
    #[arg(short = 'n', long, default_value_t = 32, value_name = "N", value_parser = at_least_one)]
    pub tokens: usize,
    /// Measure behind a context of N tokens, whose KV cache has made-up values: nothing is prefilled for it; with
    /// --llama-bench behind each of several
    #[arg(short, long = "depth", default_value = "0", value_name = "N,…", value_delimiter = ',')]
    pub depths: Vec<usize>,
    /// Measure and print as llama-bench does: rows of prefill and of decode, each alone, of which the average counts
    #[arg(long, value_name = "FORMAT", help_heading = heading::OUTPUT)]
    #[arg(conflicts_with_all = ["json", "first_token", "clients", "vs_resident", "trace", "speculate"])]
    pub llama_bench: Option<RowsFormat>,
    /// Lengths of the prompts whose first token is timed, or off (default: those of 32, 512 and 3968 tokens that fit
    /// the context; off with --depth)
    #[arg(long, value_name = "N,…|off", value_parser = parse_lengths)]
    pub first_token: Option<PromptLengths>,
    /// Measure also decode of N sequences at once, as the server does for N clients
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = at_least_one)]
    pub clients: Vec<usize>,
    /// Number of runs. The first starts with an empty cache (cold); the median of the others (warm) is shown
    #[arg(short, long, default_value_t = 3, value_name = "N", value_parser = at_least_one)]
    pub repeats: usize,
    /// Measure also with all experts in memory
    #[arg(long)]
    pub vs_resident: bool,
    /// Decode with the experts of a recorded trace: a file, or a folder that `larder lab import` takes. The weights of
    /// a model of the trace's shape may be any
    #[arg(long, value_name = "FILE", conflicts_with_all = ["routing", "quality", "clients", "vs_resident", "speculate"])]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::MEASUREMENT }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print every run as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// The form of rows, by the names of llama-bench.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum RowsFormat {
    /// A Markdown table
    Md,
    /// Comma-separated values, with a heading
    Csv,
    /// An array of objects, with each run
    Json,
}

/// Lengths of prompts in tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PromptLengths(pub Vec<usize>);

fn parse_lengths(text: &str) -> Result<PromptLengths, String> {
    match text {
        "off" => Ok(PromptLengths(Vec::new())),
        _ => text.split(',').map(at_least_one).collect::<Result<_, _>>().map(PromptLengths),
    }
}

/// Sampling; the model's recommendation where a flag is missing.
#[derive(Args)]
#[command(next_help_heading = heading::SAMPLING)]
pub struct SamplingFlags {
    /// Temperature of sampling; 0 is greedy (default: the model's)
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Sample from the K most likely tokens only; 0 is off (default: the model's)
    #[arg(long, hide_short_help = true, value_name = "K")]
    pub top_k: Option<usize>,
    /// Sample from the likeliest tokens that add up to P; 1 is off
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Sample from tokens with at least P times the probability of the most likely one; 0 is off (default: the model's)
    #[arg(long, hide_short_help = true, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens that already occurred less likely; 1 is off (default: the model's)
    #[arg(long, hide_short_help = true, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
}

/// The seed of sampling.
#[derive(Args)]
#[command(next_help_heading = heading::SAMPLING)]
pub struct SeedFlag {
    /// Random seed; the same seed gives the same text
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

impl SamplingFlags {
    /// The model's recommendation, with what the flags say in its place. A temperature turns sampling on or off.
    pub fn over(&self, model: GenerationConfig) -> Result<GenerationConfig, SamplerError> {
        let SamplingFlags { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        let flags = GenerationConfig { temperature, top_k, top_p, min_p, repetition_penalty, ..Default::default() };
        let merged = model.with_sampling(&flags);
        Sampling::from(&merged).checked()?;
        Ok(merged)
    }
}

/// Write logits and routing of given tokens to a file, to check numerics
#[derive(Args)]
pub struct LogitsArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// JSON file with an array of token ids
    #[arg(long, value_name = "FILE", help_heading = heading::PROMPT)]
    pub tokens: PathBuf,
    /// Generate N more tokens greedily, past the end-of-text token
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = heading::PROMPT)]
    pub generate: usize,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::EVALUATION }>,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Safetensors file to write
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub out: OutputFile,
}

/// Parses what to do when a context is full.
pub fn context_full(text: &str) -> Result<ContextFull, String> {
    text.parse()
}

/// Parses a number of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

/// Tokenize a text or chat messages
#[derive(Args)]
pub struct TokenizeArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// Text to tokenize; - reads standard input
    #[arg(required_unless_present = "messages")]
    pub text: Option<String>,
    /// JSON file with a chat for the model's chat template: an array of messages, or an object with messages, tools,
    /// documents and chat_template_kwargs; - reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub messages: Option<PathBuf>,
    /// With --messages: chat template in Jinja, in place of the model's
    #[arg(long, value_name = "FILE", requires = "messages")]
    pub chat_template_file: Option<PathBuf>,
    /// With --messages: leave out the prefix of the answer that the template adds
    #[arg(long, requires = "messages")]
    pub no_generation_prompt: bool,
    /// Leave out special tokens such as BOS
    #[arg(long)]
    pub no_special: bool,
}
