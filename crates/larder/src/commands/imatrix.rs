//! `larder imatrix`.

use std::time::Instant;

use anyhow::Result;
use larder_runtime::default_threads;
use larder_runtime::text_pass::measure_importance;
use serde_json::json;

use super::eval::{Passage, bar};
use crate::cli::imatrix::ImatrixArgs;
use crate::models;

/// Measures an importance matrix and writes it to a file.
pub fn run(args: &ImatrixArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let passage = Passage::open(&model, &args.text)?;
    let chunks: Vec<&[u32]> = passage.chunks().collect();
    let (bar, start) = (bar(passage.tokens()), Instant::now());
    let threads = args.threads.unwrap_or_else(default_threads);
    let made =
        measure_importance(&model, (&passage.name, passage.chunk), &chunks, threads, &mut |n| bar.advance(n as u64))?;
    bar.finish();
    made.write(&args.out)?;
    let (seconds, path) = (start.elapsed().as_secs_f64(), args.out.display());
    if args.json {
        let (matrices, tokens) = (made.len(), passage.tokens());
        println!("{}", json!({"file": &*args.out, "matrices": matrices, "tokens": tokens, "seconds": seconds}));
        return Ok(());
    }
    println!("{path}: {} matrices, from {} in {seconds:.1} s", made.len(), passage.describe());
    Ok(())
}
