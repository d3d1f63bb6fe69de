//! `larder lab report`.

use anyhow::{Result, bail};
use larder_lab::ReportOrigin;
use larder_lab::report::{SweepReport, sweep_page};
use larder_policy::eviction::PolicyInputs;

use super::{heat, read_trace};
use crate::cli::lab::LabReportArgs;
use crate::output;
use crate::report_origin::report_origin;

/// Writes the report page of a sweep.
pub fn run(args: &LabReportArgs) -> Result<()> {
    let mut outcome = SweepReport::read(&args.sweep)?;
    // A file of an older version does not say how it came about; then the page says how the page did.
    let page = || ReportOrigin { machine: Vec::new(), ..report_origin(None, None) };
    outcome.made.get_or_insert_with(page);
    let heats = match &args.trace {
        Some(path) => {
            let trace = read_trace(path)?;
            let (has, had) = ([trace.rows, trace.experts], [outcome.trace.layers, outcome.trace.experts]);
            if has != had {
                let (path, sweep) = (path.display(), args.sweep.display());
                bail!(
                    "{path} has {} layers of {} experts, but the trace of {sweep} had {} of {}",
                    has[0],
                    has[1],
                    had[0],
                    had[1]
                );
            }
            heat::draw(&args.heat, &trace, &PolicyInputs::default())?
        }
        None => Vec::new(),
    };
    output::write(&args.out, sweep_page(&outcome, &heats))?;
    println!("{}: {} results", args.out.display(), outcome.rows.len());
    Ok(())
}
