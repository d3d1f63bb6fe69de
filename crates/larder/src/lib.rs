//! The command line: flags, progress and printing. Everything else lives in the crates below.

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};

mod advice;
mod chat;
mod cli;
mod commands;
mod config;
mod doctor;
#[cfg(feature = "edge")]
mod edge;
mod engine;
mod experts;
mod gpu;
mod load;
mod memory;
mod mlock;
mod models;
mod open;
mod plan;
mod print;
mod probe;
mod progress;
mod slots;
mod telemetry;
mod tiers;
mod xdg;

pub use open::OpenModel;

/// Parses the command line, runs it, and turns an error into one sentence and an exit code: 0 done, 1 failed, 2 bad
/// usage.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", advice::message(&error));
            ExitCode::FAILURE
        }
    }
}

/// What is typed wrong is told by the parser itself, which then ends the program.
fn run() -> Result<()> {
    let typed: Vec<_> = std::env::args_os().collect();
    let matches = cli::Cli::command().get_matches_from(&typed);
    let line = config::apply(typed, &matches)?;
    commands::run(cli::Cli::parse_from(line).command)
}
