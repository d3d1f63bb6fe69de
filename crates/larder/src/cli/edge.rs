//! The flags of what several machines do together.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use larder_placement::{Algorithm, ServingMode, WireFormat, algorithm};

use super::at_least_one;
#[cfg(feature = "edge")]
use super::edge_worker::EdgeWorkerArgs;

/// Let several machines compute the experts of a model.
#[derive(Args)]
pub struct EdgeArgs {
    #[command(subcommand)]
    pub command: EdgeCommand,
}

#[derive(Subcommand)]
pub enum EdgeCommand {
    /// Decide which experts the device and the servers hold, and say what a token is expected to take.
    Plan(EdgePlanArgs),
    /// Compare ways to place experts in a simulated network, and make a page of it.
    Simulate(SimulateArgs),
    /// Hold a share of a model's experts, and compute them for others.
    #[cfg(feature = "edge")]
    Worker(Box<EdgeWorkerArgs>),
}

/// Decide which experts the device and the servers hold, and say what a token is expected to take.
#[derive(Args)]
pub struct EdgePlanArgs {
    /// The machines, as a TOML file.
    pub topology: PathBuf,
    /// What `larder lab activations` wrote, a file for each model.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub activations: Vec<PathBuf>,
    /// How much each model is used, as in 3,1, in the order of the files; all the same unless said otherwise.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub share: Vec<f64>,
    /// How to place experts: greedy, greedy-gain, accelerated, dp, lfu, random or u-shaped.
    #[arg(long, value_name = "NAME", default_value = "greedy", value_parser = parse_algorithm)]
    pub algorithm: &'static Algorithm,
    /// How servers are asked.
    #[arg(long, value_name = "HOW", default_value = "direct")]
    pub paths: PathsFlag,
    /// How numbers of hidden states travel.
    #[arg(long, value_name = "KIND", default_value = "f32")]
    pub wire: WireFlag,
    /// Repeats what is drawn at random.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Write the placement to FILE, for the workers and for `larder run --edge`.
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the numbers as JSON.
    #[arg(long)]
    pub json: bool,
}

fn parse_algorithm(name: &str) -> Result<&'static Algorithm, String> {
    algorithm(name).map_err(|e| e.to_string())
}

/// How servers are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PathsFlag {
    /// By the device itself; a server answers with one sum, and computes experts one after the other.
    Direct,
    /// Through the associated server; each expert's output comes back, and experts share a machine's speed.
    Relayed,
}

impl From<PathsFlag> for ServingMode {
    fn from(flag: PathsFlag) -> Self {
        match flag {
            PathsFlag::Direct => ServingMode::Direct,
            PathsFlag::Relayed => ServingMode::Relayed,
        }
    }
}

/// How numbers of hidden states travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum WireFlag {
    /// As they are.
    #[default]
    F32,
    /// Rounded, in half the bytes.
    Bf16,
}

impl From<WireFlag> for WireFormat {
    fn from(flag: WireFlag) -> Self {
        match flag {
            WireFlag::F32 => WireFormat::F32,
            WireFlag::Bf16 => WireFormat::Bf16,
        }
    }
}

/// Compare ways to place experts in a simulated network, and make a page of it.
#[derive(Args)]
pub struct SimulateArgs {
    /// The page to write, its numbers beside it as CSV; a name without .html is a folder for both.
    #[arg(short, long, value_name = "PATH")]
    pub out: PathBuf,
    /// Repeats everything that is drawn.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Networks that are drawn for each point.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub repeats: usize,
    /// Only what these figures need, as in 6a,9b.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub figures: Vec<String>,
    /// Networks that are computed at the same time; as many as there are processors unless said otherwise.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Print the results as JSON.
    #[arg(long)]
    pub json: bool,
}
