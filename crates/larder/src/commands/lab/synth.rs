//! `larder lab synth`.

use anyhow::Result;
use larder_lab::SyntheticRouting;

use super::summary;
use crate::cli::lab::SynthArgs;

/// Generates a random trace.
pub fn run(args: &SynthArgs) -> Result<()> {
    let synth = SyntheticRouting {
        rows: args.layers,
        experts: args.experts,
        top_k: args.top_k,
        tokens: args.tokens,
        sequences: args.sequences,
        a: args.zipf_a,
        h: args.zipf_h,
        repeat: args.repeat,
        seed: args.seed,
    };
    let trace = synth.generate()?;
    trace.write(&args.out)?;
    println!("{}: {}", args.out.display(), summary(&trace));
    Ok(())
}
