//! The flags of evaluation.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{EngineFlags, at_least_one};
use crate::open::default_model;

/// Measure how well a model reads and answers, and what routing by the cache costs it.
#[derive(Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    pub command: EvalCommand,
}

#[derive(Subcommand)]
pub enum EvalCommand {
    /// Perplexity of a text.
    Ppl(PplArgs),
    /// Questions with four answers to choose from, as in MMLU.
    Mcq(McqArgs),
    /// Problems whose answer is a number, as in GSM8K.
    Gsm8k(Gsm8kArgs),
    /// How far a routing strategy's choices are from the model's own.
    Agreement(AgreementArgs),
    /// Perplexity without the experts of a rank and after, and with others in their place.
    Sensitivity(SensitivityArgs),
    /// How often the router's expert at a rank is the best one.
    Optimal(OptimalArgs),
    /// Measure the spread of each layer's router, for --routing prior:…,delta=calibrated.
    Calibrate(CalibrateArgs),
    /// Perplexity against misses for many routing strategies and cache sizes.
    Sweep(Box<EvalSweepArgs>),
}

/// What is read.
#[derive(Args)]
pub struct TextFlags {
    /// A text in UTF-8, WikiText for example; or token ids, a JSON array in a file that ends in .json.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Cut it into pieces of N tokens, each read with nothing before it.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_two)]
    pub chunk: usize,
    /// Only the first N tokens.
    #[arg(long, value_name = "N", value_parser = at_least_two)]
    pub tokens: Option<usize>,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("must be at least 2: the first token is foretold by nothing".into()),
        n => Ok(n),
    }
}

/// Perplexity of a text.
#[derive(Args)]
pub struct PplArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    #[command(flatten)]
    pub step: StepFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// How many tokens are read at once.
#[derive(Args)]
pub struct StepFlags {
    /// Read one token at a time, as a text is written. Routing by the cache is always judged in this way.
    #[arg(long)]
    pub one_by_one: bool,
}

/// Questions with four answers to choose from: the model's answer is the letter that it finds likeliest.
#[derive(Args)]
pub struct McqArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// A CSV file with columns question, four answers, and the right one; or a folder of such files, one for each
    /// subject.
    pub questions: PathBuf,
    /// Put N answered questions before each.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub shots: usize,
    /// Where they come from, a file or a folder; the folder dev beside that of the questions unless said otherwise.
    #[arg(long, value_name = "PATH")]
    pub dev: Option<PathBuf>,
    /// Only the first N questions of each file.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    #[command(flatten)]
    pub step: StepFlags,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Problems whose answer is a number. The model writes a solution; what counts is the number at its end.
#[derive(Args)]
pub struct Gsm8kArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    /// A file with a JSON object on each line: question, and answer with the number behind ####.
    pub problems: PathBuf,
    /// Put N solved problems before each.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub shots: usize,
    /// Where they come from; train.jsonl beside the problems unless said otherwise.
    #[arg(long, value_name = "FILE")]
    pub dev: Option<PathBuf>,
    /// Only the first N problems.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Most tokens of a solution.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// How far a routing strategy's choices are from the model's own. The model chooses for itself; at each token the
/// strategy is asked what it would choose with the cache that its own choices would have left.
#[derive(Args)]
pub struct AgreementArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Let the strategy choose, one token at a time, and compare with what each layer would have chosen then.
    #[arg(long)]
    pub under_strategy: bool,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Perplexity without the experts of a rank and after, and with others drawn in the place of a rank.
#[derive(Args)]
pub struct SensitivityArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// What is drawn follows from it.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// How often the router's expert at a rank is the best one: for some tokens every other expert is tried in its place,
/// layer by layer, and the loss of the next token compared.
#[derive(Args)]
pub struct OptimalArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// The rank, the best being of rank 1.
    #[arg(long, value_name = "R", default_value_t = 2, value_parser = at_least_one)]
    pub rank: usize,
    /// Try at N tokens, spread evenly over the text.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    pub samples: usize,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Measure the spread Δ of each layer's router on a text, for --routing prior:…,delta=calibrated.
#[derive(Args)]
pub struct CalibrateArgs {
    /// A store, a checkpoint folder or a .gguf file; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// The file to write; calibration.json in the store, where it is looked for, unless said otherwise.
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Perplexity, one token at a time, against misses for many routing strategies and cache sizes.
#[derive(Args)]
pub struct EvalSweepArgs {
    /// A store; the demo model unless said otherwise.
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Slots per layer, as in 4,8,16; a quarter and a half of the experts unless said otherwise.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = at_least_one)]
    pub sizes: Vec<usize>,
    #[command(flatten)]
    pub grid: GridFlags,
    /// Mark what raises perplexity by more than this share.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01, value_parser = parse_share)]
    pub max_loss: f64,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Write all numbers to FILE, a line for each strategy and size.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write a page with plots to FILE.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print all numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=10.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 10, 0.01 being one percent".into()),
    }
}

/// Which strategies are compared, beside the model's own. Without any of these a few of each kind.
#[derive(Args, Clone, Default)]
pub struct GridFlags {
    /// λ of prior.
    #[arg(long, value_name = "L,L", value_delimiter = ',')]
    pub lambda: Vec<String>,
    /// Where prior has its Δ from.
    #[arg(long, value_name = "D,D", value_delimiter = ',', default_values_t = [DeltaFlag::Running])]
    pub delta: Vec<DeltaFlag>,
    /// Budgets of prior, in nats of KL.
    #[arg(long, value_name = "B,B", value_delimiter = ',')]
    pub budget: Vec<String>,
    /// M of max-rank.
    #[arg(long, value_name = "M,M", value_delimiter = ',')]
    pub max_rank: Vec<String>,
    /// P of cumsum.
    #[arg(long, value_name = "P,P", value_delimiter = ',')]
    pub cumsum: Vec<String>,
    /// H of prune.
    #[arg(long, value_name = "H,H", value_delimiter = ',')]
    pub prune: Vec<String>,
    /// How many of the best experts prior, max-rank and cumsum always keep; 1 if the model chooses several.
    #[arg(long, value_name = "J")]
    pub keep: Option<usize>,
}

/// Where prior has its Δ from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DeltaFlag {
    /// The mean so far.
    Running,
    /// The token at hand.
    Token,
    /// `larder eval calibrate`.
    Calibrated,
}

impl std::fmt::Display for DeltaFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            DeltaFlag::Running => "running",
            DeltaFlag::Token => "token",
            DeltaFlag::Calibrated => "calibrated",
        })
    }
}
