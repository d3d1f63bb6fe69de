//! The flags of `larder lab train` and `larder lab judge`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_lab::train::NetworkKind;

use super::at_least_one;
use super::lab::TraceFlags;

/// Train the weights of the eviction policy `learned`.
#[derive(Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// Which network.
    #[arg(long, value_name = "FORM", default_value = "crosslayer")]
    pub form: FormFlag,
    /// The weights to write.
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Sequences by which the best epoch is chosen; an eighth unless said otherwise. With 0 the last epoch counts.
    #[arg(long, value_name = "N")]
    pub choose: Option<usize>,
    /// Sequences that are kept for judging the weights at the end; a quarter unless said otherwise.
    #[arg(long, value_name = "N")]
    pub judge: Option<usize>,
    /// How often every sequence is seen, at most.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub epochs: Option<usize>,
    /// Scratch slots when the weights are judged, beside the capacity.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
    /// Draws other sequences and other first weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// Compare trained weights with `lru`, `belady` and others, on the same sequences.
#[derive(Args)]
pub struct JudgeArgs {
    #[command(flatten)]
    pub input: TraceFlags,
    /// The weights to judge.
    #[arg(long, value_name = "FILE")]
    pub evictor: PathBuf,
    /// Whom to compare them with: a policy, or a file with other weights; may be given several times.
    #[arg(long, value_name = "SPEC|FILE")]
    pub against: Vec<String>,
    /// Only sequences that training kept for judging, by the word of the weights.
    #[arg(long, conflicts_with = "sequences")]
    pub unseen: bool,
    /// Scratch slots, beside the capacity.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub scratch: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum FormFlag {
    /// Ours: from the recent choices of all layers.
    Crosslayer,
    /// The FlashMoE paper's: from recency and frequency in each layer.
    Flashmoe,
}

impl FormFlag {
    /// The same as the lab calls it.
    pub fn form(self) -> NetworkKind {
        match self {
            FormFlag::Crosslayer => NetworkKind::Crosslayer,
            FormFlag::Flashmoe => NetworkKind::Flashmoe,
        }
    }
}
