//! The flags of commands about this machine and about larder itself.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use clap_complete::Shell;

use larder_policy::routing::RoutingSpec;
use larder_runtime::models::HubName;

use super::output::{OutputFile, ReplaceFlag};
use super::{EngineFlags, IgnoreConfig, TimelineFlags, at_least_one, heading, takes};

/// Check this machine and suggest improvements
#[derive(Args)]
pub struct DoctorArgs {
    /// Store whose shards are read; or any file or folder, to test its file system with a temporary file (default: the
    /// current folder)
    #[arg(short, long, value_name = "MODEL|PATH")]
    pub model: Option<PathBuf>,
    /// Measure instead what the processor and its memory do at most, with one thread up to all
    #[arg(long, conflicts_with = "model")]
    pub peaks: bool,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::KERNELS }>,
    /// Print the findings, or the peaks, as JSON
    #[arg(long)]
    pub json: bool,
}

/// Compare routing strategies over many runs, and print a report to share: the machine, the memory plan and each speed
#[derive(Args)]
pub struct ReportArgs {
    /// Store, or STORE=N to keep N experts per layer in memory (default: that of --cache, or half of them)
    #[arg(required = true, value_name = "STORE[=N]", value_parser = StoreArg::parse)]
    pub stores: Vec<StoreArg>,
    /// Runs per strategy; strategies take turns
    #[arg(short, long, default_value_t = 10, value_name = "N", value_parser = at_least_one)]
    pub runs: usize,
    /// Number of tokens to generate in each run
    #[arg(short = 'n', long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub tokens: usize,
    /// Routing strategy to compare, as --routing of other commands; can be repeated, and the first is the baseline
    #[arg(
        long,
        help_heading = heading::ROUTING,
        value_name = "STRATEGY",
        default_values = ["original", "prior:lambda=0.2", "prior:lambda=0.8"]
    )]
    pub compare: Vec<RoutingSpec>,
    #[command(flatten)]
    pub engine: EngineFlags<{ takes::FIXED_ROUTING }>,
    #[command(flatten)]
    pub timeline: TimelineFlags,
    /// Write a page with box plots to FILE (HTML)
    #[arg(long, value_name = "FILE", help_heading = heading::OUTPUT)]
    pub html: Option<OutputFile>,
    /// Print every run as JSON
    #[arg(long, help_heading = heading::OUTPUT)]
    pub json: bool,
    #[command(flatten)]
    pub replace: ReplaceFlag,
}

/// A store and the size of its cache.
#[derive(Clone)]
pub struct StoreArg {
    /// Folder of the store.
    pub store: PathBuf,
    /// Experts per layer in memory; `None` for half of them.
    pub slots: Option<usize>,
}

/// Show settings and where they come from: the user's or a store's larder.toml, or the environment
#[derive(Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print each setting and where it comes from
    Show(ConfigShowArgs),
    /// Print the path of the user's larder.toml
    Path,
}

/// Print each setting and where it comes from
#[derive(Args)]
pub struct ConfigShowArgs {
    /// Store whose larder.toml is included
    #[arg(short, long)]
    pub model: Option<PathBuf>,
    /// Print the settings as JSON
    #[arg(long)]
    pub json: bool,
}

/// Print a shell completion script
#[derive(Args)]
pub struct CompletionsArgs {
    /// Shell to complete in
    pub shell: Shell,
}

/// Print the manual page, or write one for each command
#[derive(Args)]
pub struct ManArgs {
    /// Folder to write a page for each command to
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Download a model from the Hugging Face hub, or go on with a download
#[derive(Args)]
pub struct PullArgs {
    /// Model name: org/name, org/name@revision or org/name:FILE.gguf
    #[arg(value_parser = HubName::parse)]
    pub name: HubName,
    #[command(flatten)]
    pub ignore_config: IgnoreConfig,
}

/// List, locate and remove downloaded models
#[derive(Args)]
pub struct ModelsArgs {
    #[command(subcommand)]
    pub command: ModelsCommand,
}

#[derive(Subcommand)]
pub enum ModelsCommand {
    /// List models with their size on disk and whether they are complete
    #[command(visible_alias = "ls")]
    List(ListModelsArgs),
    /// Remove a model
    #[command(visible_alias = "remove")]
    Rm(RemoveModelArgs),
    /// Print the path of a model, or of the models folder
    Path(ModelPathArgs),
}

/// List models with their size on disk and whether they are complete
#[derive(Args)]
pub struct ListModelsArgs {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// Remove a model
#[derive(Args)]
pub struct RemoveModelArgs {
    /// Model name: org/name, org/name@revision or org/name:FILE.gguf
    #[arg(value_parser = HubName::parse)]
    pub name: HubName,
    /// Remove without asking
    #[arg(long, short)]
    pub yes: bool,
}

/// Print the path of a model, or of the models folder
#[derive(Args)]
pub struct ModelPathArgs {
    /// Model name (default: print the models folder)
    #[arg(value_parser = HubName::parse)]
    pub name: Option<HubName>,
}
