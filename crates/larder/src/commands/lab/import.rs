//! `larder lab import`.

use anyhow::Result;
use larder_lab::import::{ImportOptions, import};

use super::{summary, trace_json};
use crate::cli::lab::ImportArgs;

/// Imports a trace from another program's format.
pub fn run(args: &ImportArgs) -> Result<()> {
    let trace = import(&args.source, &ImportOptions { experts: args.experts, skip_repetitive: args.skip_repetitive })?;
    trace.write(&args.out)?;
    if args.json {
        println!("{}", trace_json(&trace))
    } else {
        println!("{}: {}", args.out.display(), summary(&trace))
    }
    Ok(())
}
