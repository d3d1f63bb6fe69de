//! The flags of `larder prove`.

use std::path::PathBuf;

use clap::Args;

use super::output::{OutputFile, ReplaceFlag};
use super::{EngineFlags, IgnoreConfig, at_least_one, heading, takes};
use crate::models::default_model;

/// Prove that threads, caches, batches, readers and instruction sets change no bit of what a model computes
#[derive(Args)]
pub struct ProveArgs {
    /// Store, checkpoint folder or .gguf file (default: the demo model)
    #[arg(short, long, default_value_os_t = default_model(), hide_default_value = true, help_heading = heading::MODEL)]
    pub model: PathBuf,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
    /// Number of tokens to generate for each text, of which one is greedy and one is sampled; with --against, as many
    /// as the file has
    #[arg(short = 'n', long, default_value_t = 32, value_name = "N", value_parser = at_least_one)]
    pub tokens: usize,
    /// Write tokens and logits to FILE (safetensors), for --against on another machine or with another model
    #[arg(long, value_name = "FILE", conflicts_with = "against", help_heading = heading::OUTPUT)]
    pub save: Option<OutputFile>,
    /// Compare with FILE, which --save wrote, and do nothing else; - reads standard input
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub against: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::PROOF }>,
    /// Print the results as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}
