//! The `larder` command: flags, configuration, the memory plan, printing, the chat and the doctor.
//!
//! The crate connects the crates below to a program: it opens models ([`OpenModel`]), decides what stays in memory, starts
//! the engine and prints results. It computes nothing itself: products, caching, routing and sampling are in those crates.
//! [`main`] is the whole program. A library error becomes one sentence here, with advice where there is a remedy.
//!
//! ```
//! use std::path::Path;
//!
//! let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
//! let model = larder::OpenModel::open(&demo).expect("the repository has the demo model");
//! let geometry = &model.blueprint.geometry;
//! assert!(geometry.top_k < geometry.experts);
//!
//! let text = model.text_codec().expect("the demo model has a tokenizer");
//! let ids = text.tokenizer.encode("The old man", true).expect("any text has tokens");
//! assert!(text.tokenizer.decode(&ids, true).ends_with("The old man"));
//! ```

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser};

#[macro_use]
mod stdout;

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

/// Runs the command line; the parser itself reports wrong usage and ends the program.
fn run() -> Result<()> {
    let typed: Vec<_> = std::env::args_os().collect();
    let matches = cli::Cli::command().get_matches_from(&typed);
    let line = config::apply(typed, &matches)?;
    commands::run(cli::Cli::parse_from(line).command)
}
