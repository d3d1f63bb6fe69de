//! The `larder` command: flags, configuration, printing, the chat and the doctor.
//!
//! [`main`] is the whole program. A command turns its flags into the options of larder-runtime, which opens the model,
//! plans its memory and starts the engine; the command prints what that reports, and the results. A library error
//! becomes one sentence here, with advice where there is a remedy. A program of your own that runs models uses
//! larder-runtime, not this crate.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Result;
use clap::FromArgMatches;
use larder_runtime::error_message;

#[macro_use]
mod stdout;

mod chat;
mod cli;
mod commands;
mod config;
mod doctor;
mod images;
#[cfg(feature = "serve")]
mod launch;
mod models;
mod origin;
mod output;
mod print;
mod progress;
mod report_origin;
mod run_report;
mod telemetry;
mod timeline;
mod user_folders;

pub use user_folders::{cache as cache_folder, models as models_folder};

/// The words of the command line, the program's name included.
static TYPED: OnceLock<Vec<OsString>> = OnceLock::new();

/// Runs the command line of the process; see [`main_of`].
pub fn main() -> ExitCode {
    ExitCode::from(main_of(std::env::args_os().collect(), None))
}

/// Parses a command line, of which the first word is the program's name, and runs the command; once in a process. A
/// program that brings the demo model along says in which folder it is. Returns the exit code: 0 success, 1 an error,
/// which is printed as one sentence, and 2 wrong usage.
pub fn main_of(typed: Vec<OsString>, demo: Option<PathBuf>) -> u8 {
    let typed = TYPED.get_or_init(|| typed);
    demo.into_iter().for_each(models::set_demo);
    match run(typed.clone()) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error: {}", error_message(&error));
            if error.is::<config::MovedName>() { 2 } else { 1 }
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
fn run(typed: Vec<OsString>) -> Result<()> {
    #[cfg(unix)]
    report_large_files_as_errors()?;
    let matches = cli::renamed::parse(&typed);
    let typed = cli::words::with_flags(typed, &matches).unwrap_or_else(|error| error.exit());
    let matches = cli::renamed::parse(&typed);
    let line = config::apply(typed, &matches)?;
    let matches = cli::renamed::parse(&line);
    let cli = cli::Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    output::check_all(&matches)?;
    config::choose_kernels(&matches)?;
    let _timeline = timeline::begin(&matches)?;
    commands::run(cli.command)
}
