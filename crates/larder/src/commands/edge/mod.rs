//! The commands of `larder edge`, one file each.

use anyhow::Result;

use crate::cli::edge::{EdgeArgs, EdgeCommand};

mod plan;
mod report;
mod simulate;
#[cfg(feature = "edge")]
mod worker;

/// Runs a command of `larder edge`.
pub fn run(args: &EdgeArgs) -> Result<()> {
    match &args.command {
        EdgeCommand::Plan(args) => plan::run(args),
        EdgeCommand::Simulate(args) => simulate::run(args),
        #[cfg(feature = "edge")]
        EdgeCommand::Worker(args) => worker::run(args),
    }
}
