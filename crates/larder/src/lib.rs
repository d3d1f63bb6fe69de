//! The command line: flags, progress and printing. Everything else lives in the crates below.

use std::process::ExitCode;

use clap::Parser;

mod advice;
mod cli;
mod commands;
mod engine;
mod load;
mod memory;
mod open;
mod plan;
mod print;
mod probe;
mod progress;
mod telemetry;

pub use open::Model;

/// Parses the command line, runs it, and turns an error into one sentence and an exit code: 0 done, 1 failed, 2 bad
/// usage.
pub fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match commands::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", advice::sentence(&error));
            ExitCode::FAILURE
        }
    }
}
