//! The flags of `larder eval`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use larder_lab::SweepPart;
use larder_policy::routing::RoutingSpec;

use super::output::{OutputFile, ReplaceFlag};
use super::{EngineFlags, RecordFlags, TimelineFlags, at_least_one, heading, takes};
use crate::models::default_model;

/// Evaluate a model, and what cache-aware routing costs it
#[derive(Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    pub command: EvalCommand,
}

#[derive(Subcommand)]
pub enum EvalCommand {
    /// Measure the perplexity of a text
    Ppl(PplArgs),
    /// Answer multiple-choice questions, as in MMLU
    Mcq(McqArgs),
    /// Solve word problems with a number as answer, as in GSM8K
    Gsm8k(Gsm8kArgs),
    /// Compare a routing strategy's experts with the model's own
    Agreement(AgreementArgs),
    /// Measure perplexity with experts of each rank dropped or replaced
    Sensitivity(SensitivityArgs),
    /// Measure how often the router's expert at a rank is the best one
    Optimal(OptimalArgs),
    /// Measure perplexity and cache misses for many routing strategies and cache sizes
    Sweep(Box<EvalSweepArgs>),
}

/// The text to evaluate on.
#[derive(Args, Clone)]
#[command(next_help_heading = heading::TEXT)]
pub struct TextFlags {
    /// UTF-8 text, e.g. WikiText, or a .json file with an array of token ids
    #[arg(value_name = "FILE", help_heading = None)]
    pub file: PathBuf,
    /// Split the text into chunks of N tokens, each with a context of its own
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_two)]
    pub chunk: usize,
    /// Use only the first N tokens
    #[arg(long, value_name = "N", value_parser = at_least_two)]
    pub tokens: Option<usize>,
}

fn at_least_two(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        1 => Err("must be at least 2: the first token has no context to be predicted from".into()),
        n => Ok(n),
    }
}

/// Measure the perplexity of a text
#[derive(Args)]
pub struct PplArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    #[command(flatten)]
    pub step: StepFlags,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::EVALUATION }>,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Number of tokens per step.
#[derive(Args)]
#[command(next_help_heading = heading::TEXT)]
pub struct StepFlags {
    /// Process one token per step, as in decode. Cache-aware routing is always evaluated like this
    #[arg(long)]
    pub one_by_one: bool,
}

/// Answer multiple-choice questions with four options; the model's answer is the letter with the highest logit
#[derive(Args)]
pub struct McqArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    /// CSV file with the columns question, four options and right answer; or a folder of such files, one per subject
    pub questions: PathBuf,
    /// Number of answered examples before each question
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = heading::TEXT)]
    pub shots: usize,
    /// File or folder with the examples (default: the folder dev beside that of the questions)
    #[arg(long, value_name = "PATH", help_heading = heading::TEXT)]
    pub dev: Option<PathBuf>,
    /// Use only the first N questions of each file
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = heading::TEXT)]
    pub limit: Option<usize>,
    #[command(flatten)]
    pub step: StepFlags,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::EVALUATION }>,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Solve word problems; the last number of the generated solution is compared with the right answer
#[derive(Args)]
pub struct Gsm8kArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    /// JSON lines file with the keys question and answer; the number follows #### in the answer
    pub problems: PathBuf,
    /// Number of solved examples before each problem
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = heading::TEXT)]
    pub shots: usize,
    /// File with the examples (default: train.jsonl beside the problems)
    #[arg(long, value_name = "FILE", help_heading = heading::TEXT)]
    pub dev: Option<PathBuf>,
    /// Use only the first N problems
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = heading::TEXT)]
    pub limit: Option<usize>,
    /// Maximum number of tokens of a solution
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    #[arg(help_heading = heading::TEXT)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::EVALUATION }>,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Compare a routing strategy's experts with the model's own
///
/// The model runs with its own routing. At each token, the strategy's choice is computed for the cache that its own
/// choices would have left, and compared.
#[derive(Args)]
pub struct AgreementArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Run with the strategy, one token per step, and compare with what each layer's router would have chosen
    #[arg(long, help_heading = heading::ROUTING)]
    pub under_strategy: bool,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::EVALUATION }>,
    #[command(flatten)]
    pub record: RecordFlags,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Measure perplexity with experts of each rank dropped, with all that follow, or replaced at random
#[derive(Args)]
pub struct SensitivityArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Random seed of the replacements
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = heading::TEXT)]
    pub seed: u64,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::FIXED_ROUTING }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Measure how often the router's expert at a rank is the best one
///
/// At some tokens every other expert is tried in its place, layer by layer, and the loss of the next token is compared.
#[derive(Args)]
pub struct OptimalArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Rank to test; 1 is the best
    #[arg(long, value_name = "R", default_value_t = 2, value_parser = at_least_one, help_heading = heading::TEXT)]
    pub rank: usize,
    /// Number of tokens to test at, spread evenly over the text
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, help_heading = heading::TEXT)]
    pub samples: usize,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::FIXED_ROUTING }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Print the numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
}

/// Measure perplexity and cache misses for many routing strategies and cache sizes, one token per step
#[derive(Args)]
pub struct EvalSweepArgs {
    /// Store (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub text: TextFlags,
    /// Cache sizes: experts per layer in memory, e.g. 4,8,16 (default: a quarter and a half of the experts)
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = at_least_one, help_heading = heading::CACHE)]
    pub sizes: Vec<usize>,
    #[command(flatten)]
    pub grid: GridFlags,
    /// Measure a part of the strategies and sizes, as 0/4, 1/4, 2/4 or 3/4 on four machines
    #[arg(long, hide_short_help = true, value_name = "I/N", default_value = "0/1", hide_default_value = true)]
    #[arg(help_heading = heading::OUTPUT)]
    pub part: SweepPart,
    /// Mark strategies that raise perplexity by more than this share
    #[arg(long, hide_short_help = true, value_name = "SHARE", default_value_t = 0.01, value_parser = parse_share, help_heading = heading::OUTPUT)]
    pub max_loss: f64,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::SWEEP }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Write all numbers to FILE (CSV), one line per strategy and size
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub csv: Option<OutputFile>,
    /// Write a page with plots to FILE (HTML)
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub html: Option<OutputFile>,
    /// Print all numbers as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=10.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 10, 0.01 being one percent".into()),
    }
}

/// The strategies to compare with the model's own routing; without any of these flags a few of each family.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = heading::ROUTING)]
pub struct GridFlags {
    /// Values of λ for prior; without any strategy flag a few of each
    #[arg(long, value_name = "L,L", value_delimiter = ',')]
    pub lambda: Vec<String>,
    /// Source of the spread Δ for prior
    #[arg(long, hide_short_help = true, value_name = "D,D", value_delimiter = ',', default_values_t = [DeltaFlag::Running])]
    pub delta: Vec<DeltaFlag>,
    /// KL budgets for prior, in nats
    #[arg(long, hide_short_help = true, value_name = "B,B", value_delimiter = ',')]
    pub budget: Vec<String>,
    /// Values of M for max-rank
    #[arg(long, hide_short_help = true, value_name = "M,M", value_delimiter = ',')]
    pub max_rank: Vec<String>,
    /// Values of P for cumsum
    #[arg(long, hide_short_help = true, value_name = "P,P", value_delimiter = ',')]
    pub cumsum: Vec<String>,
    /// Values of H for prune
    #[arg(long, hide_short_help = true, value_name = "H,H", value_delimiter = ',')]
    pub prune: Vec<String>,
    /// Any other strategy, with rules for missing experts, as --routing takes it: prior:lambda=0.03+light:tau=0.05 (may
    /// be repeated)
    #[arg(long, value_name = "STRATEGY")]
    pub strategy: Vec<RoutingSpec>,
    /// Number of best experts that prior, max-rank and cumsum always keep (default: 1, or 0 if the model chooses one)
    #[arg(long, hide_short_help = true, value_name = "J")]
    pub keep: Option<usize>,
}

/// Source of the spread Δ for the strategy prior.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DeltaFlag {
    /// Running mean of the sequence
    Running,
    /// The current token
    Token,
    /// As `larder tune` has measured it
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
