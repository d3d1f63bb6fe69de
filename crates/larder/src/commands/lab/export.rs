//! `larder lab export`.

use anyhow::Result;
use larder_lab::export::{oracle_general, trace_csv};

use super::{load, summary};
use crate::cli::lab::{ExportArgs, ExportFormat};

/// Exports a trace for other programs.
pub fn run(args: &ExportArgs) -> Result<()> {
    let trace = load(&args.input)?;
    match args.to {
        ExportFormat::Csv => {
            trace_csv(&trace, &args.out)?;
            println!("{}: {}", args.out.display(), summary(&trace));
        }
        ExportFormat::OracleGeneral => {
            let requests = oracle_general(&trace, &args.out)?;
            println!("{}: {requests} requests of {} objects", args.out.display(), trace.rows * trace.experts);
        }
    }
    Ok(())
}
