//! Replays a routing trace through caches of several sizes, and shows how far each eviction policy is from the optimum.
//! `cargo run --release -p larder-lab --example replay [TRACE]`

use std::error::Error;
use std::path::PathBuf;

use larder_core::{CacheScope, Trace};
use larder_lab::{InitialCache, ReplayResult, gap_closed, replay};
use larder_policy::eviction::PolicyInputs;

const POLICIES: [&str; 4] = ["lru", "lfu", "lfru:half-life=32", "s3fifo"];

fn main() -> Result<(), Box<dyn Error>> {
    let recorded = || concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/traces/gpt-oss-slice.safetensors").into();
    let trace = Trace::read(std::env::args_os().nth(1).map_or_else(recorded, PathBuf::from))?;
    println!("{} tokens through {} layers of {} experts", trace.tokens(), trace.rows, trace.experts);
    println!("misses, and in brackets the share of the gap from lru to belady that a policy closes");
    for quarters in 1..4 {
        let slots = (trace.experts * quarters).div_ceil(4);
        let run = |policy: &str| -> Result<ReplayResult, Box<dyn Error>> {
            let cache = (slots, CacheScope::Layer, 0); // slots per layer, one pool per layer, no scratch slots
            Ok(replay(&trace, cache, &policy.parse()?, &PolicyInputs::default(), InitialCache::Cold)?)
        };
        let (lru, belady) = (run("lru")?, run("belady")?);
        print!("{slots:3} slots per layer: belady {}", belady.counts.misses);
        for policy in POLICIES {
            let found = run(policy)?;
            let closed = gap_closed(&found.sequences, &lru.sequences, &belady.sequences).map_or(0.0, |gap| gap.value);
            print!(", {policy} {} ({:.0} %)", found.counts.misses, 100.0 * closed);
        }
        println!();
    }
    Ok(())
}
