//! The flags of `larder edge`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use larder_edge::placement::{Algorithm, BEST_GREEDY, ServingMode, WireFormat, algorithm};

use super::at_least_one;
#[cfg(feature = "edge")]
use super::edge_worker::EdgeWorkerArgs;
use super::output::{OutputFile, ReplaceFlag};

/// Run a model's experts on several machines
#[derive(Args)]
pub struct EdgeArgs {
    #[command(subcommand)]
    pub command: EdgeCommand,
}

#[derive(Subcommand)]
pub enum EdgeCommand {
    /// Decide which experts the device and each worker hold, and estimate the time per token
    Plan(EdgePlanArgs),
    /// Compare placement algorithms in simulated networks, and write a report page
    Simulate(SimulateArgs),
    /// Serve a share of a model's experts to clients
    #[cfg(feature = "edge")]
    Worker(Box<EdgeWorkerArgs>),
}

/// Decide which experts the device and each worker hold, and estimate the time per token
#[derive(Args)]
pub struct EdgePlanArgs {
    /// Topology file (TOML): the machines, their memory and their links
    pub topology: PathBuf,
    /// Output of `larder lab activations`, one file per model
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub activations: Vec<PathBuf>,
    /// Relative use of each model, in the order of the files, e.g. 3,1 (default: equal)
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub share: Vec<f64>,
    /// Placement algorithm: best-greedy (the better of greedy and greedy-gain), greedy, greedy-gain, accelerated, dp,
    /// lfu, random or u-shaped
    #[arg(long, value_name = "NAME", default_value = BEST_GREEDY, value_parser = parse_algorithm)]
    pub algorithm: &'static Algorithm,
    /// How the device reaches the workers
    #[arg(long, value_name = "HOW", default_value = "direct")]
    pub paths: PathsFlag,
    /// Number format of hidden states on the network
    #[arg(long, value_name = "KIND", default_value = "f32")]
    pub wire: WireFlag,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Write the placement to FILE, for the workers and for `larder run --edge`
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<OutputFile>,
    /// Print the numbers as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

fn parse_algorithm(name: &str) -> Result<&'static Algorithm, String> {
    algorithm(name).map_err(|e| e.to_string())
}

/// How the device reaches the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum PathsFlag {
    /// Directly; a worker returns one sum and computes its experts one after the other
    Direct,
    /// Through the associated worker; each expert's output is returned, and experts share a machine's speed
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

/// Number format of hidden states on the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum WireFlag {
    /// Exact
    #[default]
    F32,
    /// Rounded, half the bytes
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

/// Compare placement algorithms in simulated networks, and write a report page
#[derive(Args)]
pub struct SimulateArgs {
    /// Report page to write, with a CSV file of the same name beside it; a path without .html is a folder for both
    #[arg(short, long, value_name = "PATH")]
    pub out: PathBuf,
    #[command(flatten)]
    pub replace: ReplaceFlag,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Number of random networks per data point
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    pub repeats: usize,
    /// Simulate only what these figures of the paper need, e.g. 6a,9b
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub figures: Vec<String>,
    /// Networks simulated in parallel (default: one per CPU)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}
