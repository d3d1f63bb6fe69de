//! The flags of what concerns the machine and the command itself, not a model.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use clap_complete::Shell;

/// Say what this machine has, and what could be mended.
#[derive(Args)]
pub struct Doctor {
    /// A store, whose shards are read; or any file or folder, on whose file system a temporary file is. The current
    /// folder unless said otherwise.
    #[arg(short, long, value_name = "MODEL|PATH")]
    pub model: Option<PathBuf>,
    /// Print the findings as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Show what is set where: by larder.toml of the user or of a store, by the environment, or not at all.
#[derive(Args)]
pub struct Config {
    #[command(subcommand)]
    pub command: ConfigCommand,
}

#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print each value and where it comes from.
    Show(Show),
    /// Print where the user's larder.toml is looked for.
    Path,
}

/// Print each value and where it comes from.
#[derive(Args)]
pub struct Show {
    /// A store, whose larder.toml counts as well.
    #[arg(short, long)]
    pub model: Option<PathBuf>,
    /// Print the values as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Print what makes a shell complete this command.
#[derive(Args)]
pub struct Completions {
    /// The shell.
    pub shell: Shell,
}

/// Print the manual page, or write those of all commands.
#[derive(Args)]
pub struct Man {
    /// Write a page for each command into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
