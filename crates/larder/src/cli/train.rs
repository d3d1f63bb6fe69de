//! The flags of `larder lab train` and `larder lab judge`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_lab::train::NetworkKind;
use larder_policy::eviction::learned::DistanceScale;

use super::at_least_one;
use super::output::{OutputFile, ReplaceFlag};
use super::traces::TraceFlags;

/// Train weights for the eviction policy learned
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Network to train
    #[arg(long, value_name = "FORM", default_value = "crosslayer")]
    pub form: FormFlag,
    /// Weights file to write
    #[arg(short, long, value_name = "FILE")]
    pub out: OutputFile,
    /// Number of validation sequences, to choose the best epoch (default: 1/8 of all); with 0 the last epoch is used.
    /// Near-duplicates of a drawn sequence are added
    #[arg(long, value_name = "N")]
    pub choose: Option<usize>,
    /// Number of test sequences, to measure the trained weights (default: 1/4 of all). Near-duplicates of a drawn
    /// sequence are added
    #[arg(long, value_name = "N")]
    pub judge: Option<usize>,
    /// Maximum number of epochs
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub epochs: Option<usize>,
    /// Initial learning rate
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub rate: Option<f64>,
    /// With --form flashmoe: scale of predicted distances, linear, log or decay with a number of tokens, as in log:256
    #[arg(long, value_name = "SCALE")]
    pub distance: Option<DistanceScale>,
    /// With --form flashmoe: train only on the experts that Belady's rule keeps with N slots per layer (default: on
    /// all)
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub belady_slots: Option<usize>,
    /// Scratch slots of the cache when the weights are measured
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
    /// Random seed of the split and the initial weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Print the losses and the measurements as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// Compare trained weights with lru, belady and other policies, on the same sequences
#[derive(Args)]
pub struct JudgeArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Weights file to measure
    #[arg(long, value_name = "FILE")]
    pub evictor: PathBuf,
    /// Policy or other weights file to compare with; can be repeated
    #[arg(long, value_name = "SPEC|FILE")]
    pub against: Vec<String>,
    /// Use only the test sequences that the weights file names, without near-duplicates of those of the training
    #[arg(long, conflicts_with = "sequences")]
    pub unseen: bool,
    /// Scratch slots of the cache
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
}

/// A learning rate above 0.
fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate| *rate > 0.0 && *rate <= 1.0);
    rate.ok_or_else(|| "the learning rate is a number above 0 and up to 1".to_owned())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum FormFlag {
    /// larder's own: input from the recent choices of all layers
    Crosslayer,
    /// The FlashMoE paper's: input from recency and frequency in each layer
    Flashmoe,
}

impl FormFlag {
    /// The lab's name for the network.
    pub fn form(self) -> NetworkKind {
        match self {
            FormFlag::Crosslayer => NetworkKind::Crosslayer,
            FormFlag::Flashmoe => NetworkKind::Flashmoe,
        }
    }
}
