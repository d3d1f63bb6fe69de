//! The flags, as typed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use larder_cache::CacheScope;
use larder_core::NumberFormat;
use larder_engine::Sampling;
use larder_kernels::performance_cores;
use larder_model::KvFormat;
use larder_policy::eviction::EvictionSpec;
use larder_policy::routing::RoutingSpec;

use crate::open::default_model;

pub mod chat;
pub mod device;
pub mod edge;
#[cfg(feature = "edge")]
pub mod edge_flags;
#[cfg(feature = "edge")]
pub mod edge_worker;
pub mod eval;
pub mod lab;
pub mod machine;
#[cfg(feature = "serve")]
pub mod serve;
mod size;
pub mod train;

pub use chat::ThinkingFlag;
pub use size::{ByteSize, byte_size};

/// Runs Mixture-of-Experts language models bigger than memory.
#[derive(Parser)]
#[command(name = "larder", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Make a store from a checkpoint folder or a GGUF file.
    Convert(ConvertArgs),
    /// Check every byte of a store.
    Verify(VerifyArgs),
    /// Show what a model consists of and how much of it fits in how much memory.
    Inspect(InspectArgs),
    /// Write on from a prompt.
    Run(RunArgs),
    /// Talk with a model.
    Chat(Box<chat::ChatArgs>),
    /// Answer over HTTP in OpenAI's form.
    #[cfg(feature = "serve")]
    Serve(serve::ServeArgs),
    /// Say what would stay in memory, and how fast memory and SSD would allow.
    Plan(PlanArgs),
    /// Measure reading and writing, beside what memory and SSD allow in the same run.
    Bench(BenchArgs),
    /// Measure some strategies on this machine, run after run, in a form for others to read.
    Report(Box<machine::ReportArgs>),
    /// Compute logits and routing of given tokens, for checking numerics from outside.
    Logits(LogitsArgs),
    /// Turn text into tokens as the model does.
    Tokenize(TokenizeArgs),
    /// Measure how well a model reads and answers, and what routing by the cache costs it.
    Eval(eval::EvalArgs),
    /// Record, draw, replay and compare routing.
    Lab(lab::LabArgs),
    /// Let several machines compute the experts of a model.
    Edge(edge::EdgeArgs),
    /// Say what this machine has, and what could be mended.
    Doctor(machine::DoctorArgs),
    /// List, find and remove the models that larder keeps.
    Models(machine::ModelsArgs),
    /// Show what is set where.
    Config(machine::ConfigArgs),
    /// Print what makes a shell complete this command.
    Completions(machine::CompletionsArgs),
    /// Print the manual page, or write those of all commands.
    Man(machine::ManArgs),
}

/// Make a store from a checkpoint folder or a GGUF file.
#[derive(Args)]
pub struct ConvertArgs {
    /// A checkpoint folder of the Hugging Face hub, a .gguf file, or a model's name on the hub (org/name).
    pub source: PathBuf,
    /// The store to make. A conversion that was interrupted goes on where it stopped.
    pub store: PathBuf,
    /// How to store the experts: f32, f16, bf16, q8_0, q4_0, or keep.
    #[arg(long, default_value = "keep", value_name = "KIND", value_parser = parse_stored_as)]
    pub experts: StoredAs,
    /// How to store the other products' weights: f32, f16, bf16, q8_0, q4_0, or keep.
    #[arg(long, default_value = "keep", value_name = "KIND", value_parser = parse_stored_as)]
    pub resident: StoredAs,
    /// Print the report as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `keep`, or a kind that larder writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredAs(pub Option<NumberFormat>);

fn parse_stored_as(text: &str) -> Result<StoredAs, String> {
    match text {
        "keep" => Ok(StoredAs(None)),
        other => match other.parse::<NumberFormat>() {
            Ok(
                kind @ (NumberFormat::F32
                | NumberFormat::F16
                | NumberFormat::Bf16
                | NumberFormat::Q8_0
                | NumberFormat::Q4_0),
            ) => Ok(StoredAs(Some(kind))),
            _ => Err("larder writes f32, f16, bf16, q8_0 and q4_0, or keeps what there is".into()),
        },
    }
}

/// Check every byte of a store.
#[derive(Args)]
pub struct VerifyArgs {
    /// The store.
    pub store: PathBuf,
    /// Print the findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Show what a model consists of and how much of it fits in how much memory.
#[derive(Args)]
pub struct InspectArgs {
    /// A store, a checkpoint folder or a .gguf file.
    pub model: PathBuf,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Write on from a prompt.
#[derive(Args)]
pub struct RunArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// The text to go on from; `-` reads it from standard input.
    #[arg(short, long)]
    pub prompt: String,
    /// Put the prompt into the model's chat template, as a user's message.
    #[arg(long)]
    pub chat: bool,
    /// A system message before the prompt; implies --chat.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens to write.
    #[arg(short = 'n', long, default_value_t = 256, value_name = "N")]
    pub max_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Tokens to have room for, the prompt's included; as many as can be needed unless said otherwise.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub context: Option<usize>,
    /// Stop before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Write on where the model would end its text.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Write a line for each token to FILE (CSV): where its time went and what was read for it.
    #[arg(long, value_name = "FILE")]
    pub telemetry: Option<PathBuf>,
    /// Print one JSON object instead of the text.
    #[arg(long)]
    pub json: bool,
}

/// How the engine runs. Without any of the cache flags all experts stay in memory if they fit; otherwise, of a store,
/// as many as fit do and the others are read when they are needed.
#[derive(Args, Clone)]
pub struct EngineFlags {
    /// Run a GGUF file as it is, and make no store beside it.
    #[arg(long)]
    pub no_store: bool,
    /// Keep N experts per layer in memory and read the others from the store.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub cache_experts: Option<usize>,
    /// Keep as many experts in memory as fit into SIZE (4G, 512M, 1.5GiB).
    #[arg(long, value_name = "SIZE", value_parser = byte_size, conflicts_with = "cache_experts")]
    pub cache_mem: Option<ByteSize>,
    /// If all experts fit, read them before the first token, and not when they are first wanted.
    #[arg(long, conflicts_with_all = ["cache_experts", "cache_mem"])]
    pub preload: bool,
    /// What shares the slots: the experts of one layer, or all.
    #[arg(long, value_name = "SCOPE", default_value = "layer")]
    pub cache_scope: ScopeFlag,
    /// Who leaves when room is needed: lru, lfu, lfru, learned and others, with options as in random:seed=7.
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    pub eviction: EvictionSpec,
    /// Trained weights for --eviction learned; the store's own unless said otherwise.
    #[arg(long, value_name = "FILE")]
    pub evictor: Option<PathBuf>,
    /// Slots beside the others for experts that may leave as soon as they were used.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub cache_scratch: usize,
    /// Which experts a token gets: original, or by what is in memory, which may change the text: prior:lambda=0.2,
    /// prior:budget=0.01, max-rank:m=8, cumsum:p=0.9, prune:h=4.
    #[arg(long, value_name = "STRATEGY", default_value = "original")]
    pub routing: RoutingSpec,
    /// Write down which experts were chosen, for the lab.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// With --trace: the router's logits as well.
    #[arg(long, requires = "trace")]
    pub trace_logits: bool,
    /// How shards are read: auto, uring or pread.
    #[arg(long, value_name = "READER", default_value = "auto")]
    pub reader: String,
    /// Read ahead the N experts that the next layer will most likely choose, or none.
    #[arg(long, value_name = "off|N", default_value = "off", value_parser = parse_prefetch)]
    pub prefetch: usize,
    /// Threads that compute; as many as there are processors, without those that are less than half as strong as others,
    /// unless said otherwise.
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Bind each computing thread to a processor of its own.
    #[arg(long)]
    pub pin: bool,
    /// Multiply quantised weights with activations as they are, not rounded to eight bits: slower.
    #[arg(long)]
    pub exact: bool,
    /// How keys and values are remembered; f16 where experts are quantised, else f32, unless said otherwise.
    #[arg(long, value_name = "FORMAT")]
    pub kv: Option<KvFlag>,
    /// Keep the system from paging out what stays in memory.
    #[arg(long)]
    pub mlock: bool,
    /// What computes.
    #[command(flatten)]
    pub device: device::DeviceFlags,
    /// Who else computes experts.
    #[cfg(feature = "edge")]
    #[command(flatten)]
    pub edge: edge_flags::EdgeFlags,
}

impl EngineFlags {
    /// How many threads compute.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }

    /// Whether others compute experts as well.
    pub fn uses_edge(&self) -> bool {
        #[cfg(feature = "edge")]
        return self.edge.topology.is_some();
        #[cfg(not(feature = "edge"))]
        false
    }
}

/// As many threads as there are processors that are worth it, within reason.
pub fn default_threads() -> usize {
    performance_cores().min(THREADS_MAX)
}

/// More would only wait for each other.
const THREADS_MAX: usize = 64;

fn parse_threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        n if n > THREADS_MAX => Err(format!("must be at most {THREADS_MAX}")),
        n => Ok(n),
    }
}

fn parse_prefetch(text: &str) -> Result<usize, String> {
    match text {
        "off" => Ok(0),
        n => n.parse().map_err(|_| "is neither off nor a number".into()),
    }
}

/// How keys and values are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum KvFlag {
    /// As they are.
    F32,
    /// Rounded, in half the memory.
    F16,
}

impl From<KvFlag> for KvFormat {
    fn from(flag: KvFlag) -> Self {
        match flag {
            KvFlag::F32 => KvFormat::F32,
            KvFlag::F16 => KvFormat::F16,
        }
    }
}

/// What shares the slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum ScopeFlag {
    /// The experts of one layer.
    Layer,
    /// All experts.
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

/// Say what would stay in memory, and how fast memory and SSD would allow.
#[derive(Args)]
pub struct PlanArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// Tokens to have room for.
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = at_least_one)]
    pub context: usize,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Measure reading and writing, beside what memory and SSD allow in the same run.
#[derive(Args)]
pub struct BenchArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// Tokens of the prompt, drawn at random.
    #[arg(short, long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub prompt: usize,
    /// Tokens to write.
    #[arg(short = 'n', long, default_value_t = 32, value_name = "N", value_parser = at_least_one)]
    pub tokens: usize,
    /// How often. The first run begins with an empty cache (cold); of the others (warm) the median is shown.
    #[arg(short, long, default_value_t = 3, value_name = "N", value_parser = at_least_one)]
    pub repeats: usize,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Measure also with every expert in memory.
    #[arg(long)]
    pub vs_resident: bool,
    /// Print every run as JSON.
    #[arg(long)]
    pub json: bool,
}

/// How tokens are drawn. Without any of these the most likely token is taken.
#[derive(Args)]
pub struct SamplingFlags {
    /// Draw tokens, with logits divided by this; 0 takes the most likely one.
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub temperature: f32,
    /// Draw from the K most likely tokens only; 0 from all.
    #[arg(long, default_value_t = 0, value_name = "K")]
    pub top_k: usize,
    /// Draw from the most likely tokens that together have probability P.
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true)]
    pub top_p: f32,
    /// Draw from tokens with at least P times the probability of the most likely one.
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub min_p: f32,
    /// Make tokens that came before less likely; 1 does nothing.
    #[arg(long, default_value_t = 1.0, value_name = "R", allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Repeats a drawn text exactly.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

impl SamplingFlags {
    /// How tokens are drawn, apart from the seed.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            ..Sampling::default()
        }
    }
}

/// Compute logits and routing of given tokens, for checking numerics from outside.
#[derive(Args)]
pub struct LogitsArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// A JSON array of token ids.
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// The safetensors file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Also write on greedily for N tokens, without stopping at the end of the text.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub generate: usize,
    /// Read the tokens N at a time.
    #[arg(long, default_value_t = larder_engine::PREFILL_CHUNK, value_name = "N", value_parser = at_least_one)]
    pub chunk: usize,
    #[command(flatten)]
    pub engine: EngineFlags,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(format!("{e}")),
    }
}

/// Turn text into tokens as the model does.
#[derive(Args)]
pub struct TokenizeArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// The text; `-` reads it from standard input.
    #[arg(required_unless_present = "messages")]
    pub text: Option<String>,
    /// A JSON array of chat messages, put into the model's chat template; `-` reads it from standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub messages: Option<PathBuf>,
    /// Leave out the beginning of an answer that the template would add.
    #[arg(long, requires = "messages")]
    pub no_generation_prompt: bool,
    /// Leave out the tokens that the model expects around a text.
    #[arg(long)]
    pub no_special: bool,
}
