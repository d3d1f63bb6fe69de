use anyhow::Result;
use larder_lab::import::{Import, import};

use super::{facts, summary};
use crate::cli::lab::Import as Args;

/// Makes a trace from those of other programs.
pub fn run(args: &Args) -> Result<()> {
    let trace = import(&args.source, &Import { experts: args.experts, skip_repetitive: args.skip_repetitive })?;
    trace.write(&args.out)?;
    match args.json {
        true => println!("{}", facts(&trace)),
        false => println!("{}: {}", args.out.display(), summary(&trace)),
    }
    Ok(())
}
