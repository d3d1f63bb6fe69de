//! The `larder` command: flags, configuration, printing, the chat and the doctor.
//!
//! [`main`] is the whole program. A command turns its flags into the options of larder-runtime, which opens the model, plans
//! its memory and starts the engine; the command prints what that reports, and the results. A library error becomes one
//! sentence here, with advice where there is a remedy. A program of your own that runs models uses larder-runtime, not this
//! crate.

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches};

#[macro_use]
mod stdout;

mod advice;
mod chat;
mod cli;
mod commands;
mod config;
mod doctor;
mod models;
mod origin;
mod output;
mod print;
mod progress;
mod report_origin;
mod telemetry;
mod timeline;
mod user_folders;

/// Parses the command line and runs the command. Exit codes: 0 success, 1 an error, which is printed as one sentence, and
/// 2 wrong usage.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", advice::message(&error));
            ExitCode::FAILURE
        }
    }
}

/// Makes a write beyond the limit of file sizes fail instead of ending the program by a signal.
#[cfg(unix)]
fn report_large_files_as_errors() -> Result<()> {
    use std::sync::{Arc, atomic::AtomicBool};

    use anyhow::Context;
    use signal_hook::{consts::SIGXFSZ, flag};

    let seen = Arc::new(AtomicBool::new(false));
    flag::register(SIGXFSZ, seen).map(drop).context("the handler of SIGXFSZ cannot be registered")
}

/// Runs the command line; the parser itself reports wrong usage and ends the program.
fn run() -> Result<()> {
    #[cfg(unix)]
    report_large_files_as_errors()?;
    let typed: Vec<_> = std::env::args_os().collect();
    let matches = cli::Cli::command().get_matches_from(&typed);
    let line = config::apply(typed, &matches)?;
    let matches = cli::Cli::command().get_matches_from(line);
    let cli = cli::Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    output::check_all(&matches)?;
    let _timeline = timeline::begin(&matches)?;
    commands::run(cli.command)
}
