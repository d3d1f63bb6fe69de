//! The flags of what concerns the machine and the command itself, not a model.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use clap_complete::Shell;

use larder_policy::routing::RoutingSpec;

use super::{EngineFlags, at_least_one};
use crate::models::HubName;

/// Say what this machine has, and what could be mended.
#[derive(Args)]
pub struct DoctorArgs {
    /// A store, whose shards are read; or any file or folder, on whose file system a temporary file is. The current
    /// folder unless said otherwise.
    #[arg(short, long, value_name = "MODEL|PATH")]
    pub model: Option<PathBuf>,
    /// Print the findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Measure some strategies on this machine, run after run, in a form for others to read: the machine, the plan, and the
/// speed of each run.
#[derive(Args)]
pub struct ReportArgs {
    /// A store, or STORE=N with N experts of each layer in memory; half of them unless said otherwise.
    #[arg(required = true, value_name = "STORE[=N]", value_parser = StoreArg::parse)]
    pub stores: Vec<StoreArg>,
    /// Runs of each strategy; they take turns.
    #[arg(short, long, default_value_t = 10, value_name = "N", value_parser = at_least_one)]
    pub runs: usize,
    /// Tokens that each run writes.
    #[arg(short = 'n', long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub tokens: usize,
    /// What is compared with the first of them, as --routing of other commands.
    #[arg(
        long,
        value_name = "STRATEGY",
        default_values = ["original", "prior:lambda=0.2", "prior:lambda=0.8"]
    )]
    pub compare: Vec<RoutingSpec>,
    #[command(flatten)]
    pub engine: EngineFlags,
    /// Write a page with box plots.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print every run as JSON.
    #[arg(long)]
    pub json: bool,
}

/// A store and how many experts of each layer stay in memory.
#[derive(Clone)]
pub struct StoreArg {
    /// The store.
    pub store: PathBuf,
    /// Half of the experts if there is none.
    pub slots: Option<usize>,
}

/// Show what is set where: by larder.toml of the user or of a store, by the environment, or not at all.
#[derive(Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print each value and where it comes from.
    Show(ConfigShowArgs),
    /// Print where the user's larder.toml is looked for.
    Path,
}

/// Print each value and where it comes from.
#[derive(Args)]
pub struct ConfigShowArgs {
    /// A store, whose larder.toml counts as well.
    #[arg(short, long)]
    pub model: Option<PathBuf>,
    /// Print the values as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Print what makes a shell complete this command.
#[derive(Args)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: Shell,
}

/// Print the manual page, or write those of all commands.
#[derive(Args)]
pub struct ManArgs {
    /// Write a page for each command into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// List, find and remove the models that larder keeps.
#[derive(Args)]
pub struct ModelsArgs {
    #[command(subcommand)]
    pub command: ModelsCommand,
}

#[derive(Subcommand)]
pub enum ModelsCommand {
    /// Print each model, its size on disk, and whether it is complete.
    List(ListModelsArgs),
    /// Remove a model.
    Rm(RemoveModelArgs),
    /// Print where a model is, or where all are.
    Path(ModelPathArgs),
}

/// Print each model, its size on disk, and whether it is complete.
#[derive(Args)]
pub struct ListModelsArgs {
    /// Print the models as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Remove a model.
#[derive(Args)]
pub struct RemoveModelArgs {
    /// Its name: org/name, org/name@revision or org/name:FILE.gguf.
    #[arg(value_parser = HubName::parse)]
    pub name: HubName,
    /// Do not ask.
    #[arg(long, short)]
    pub yes: bool,
}

/// Print where a model is, or where all are.
#[derive(Args)]
pub struct ModelPathArgs {
    /// Its name; without it, the folder of all models is printed.
    #[arg(value_parser = HubName::parse)]
    pub name: Option<HubName>,
}
