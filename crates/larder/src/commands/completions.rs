//! `larder completions` and `larder man`.

use std::io::Write;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::cli::Cli;
use crate::cli::machine::{CompletionsArgs, ManArgs};

/// Prints a shell completion script.
pub fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "larder", &mut script);
    print_all(&script)
}

/// Prints the manual page, or writes one for each command.
pub fn man(args: &ManArgs) -> Result<()> {
    let Some(dir) = &args.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return print_all(&page);
    };
    let shown = || dir.display().to_string();
    std::fs::create_dir_all(dir).with_context(shown)?;
    clap_mangen::generate_to(Cli::command(), dir).with_context(shown)
}

/// Writes to standard output; a reader that closes the pipe early is no error.
fn print_all(bytes: &[u8]) -> Result<()> {
    match std::io::stdout().write_all(bytes) {
        Err(error) if !crate::stdout::is_closed_pipe(&error) => Err(error).context("writing to standard output failed"),
        _ => Ok(()),
    }
}
