//! `larder lab replay`.

use std::time::Instant;

use anyhow::{Error, Result};
use larder_core::Trace;
use larder_lab::{InitialCache, ReplayLoad, ReplayResult, Requests, replay_requests, reroute};
use larder_policy::routing::quality::Quality;
use serde_json::{Value, json};

use super::{load, policy_inputs, start, summary};
use crate::cli::lab::ReplayArgs;
use crate::print;

/// Replays a trace with one eviction policy.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let profile = args.replay.profile.profile().map_err(Error::msg)?;
    let mut trace = load(&args.input)?;
    let slots = args.cache.unwrap_or((trace.experts / 4).max(1));
    let quality = reroute_trace(args, &mut trace, slots)?;
    let (found, seconds) = replay(args, &trace, slots)?;
    let load = ReplayLoad { tokens: found.tokens, wanted: found.counts.wanted(), misses: found.counts.misses };
    let speed = profile.map(|p| p.tokens_per_second(&load));
    if args.json {
        println!("{}", numbers(args, &trace, slots, &found, quality.as_ref(), speed, seconds));
        return Ok(());
    }
    let counts = found.counts;
    let (wanted, tokens) = (counts.wanted(), found.tokens.max(1) as f64);
    println!("{}", summary(&trace));
    println!(
        "{}: {}{}, {}",
        args.eviction,
        if args.recorded_capacity { "slots as recorded".into() } else { format!("{slots} slots per layer") },
        if args.replay.scratch > 0 { format!(" and {} scratch slots", args.replay.scratch) } else { String::new() },
        match start_of(args) {
            InitialCache::Carried => "kept from sequence to sequence",
            InitialCache::Cold => "empty before each sequence",
        }
    );
    println!("{:.2} % hits of {wanted} requests", 100.0 * found.hit_rate());
    println!("{} misses, {:.2} per token, {} of them first uses", counts.misses, counts.misses as f64 / tokens, {
        counts.misses - counts.rereads
    });
    println!("{} evictions; mean lifetime {:.1} passes", counts.evictions, found.lifetimes.mean());
    println!("{} misses within {} passes of the eviction", found.lifetimes.refetches, larder_lab::REFETCH_WITHIN);
    if let (Some(quality), Some(routing)) = (&quality, &args.routing) {
        println!("{}", print::quality(&routing.to_string(), quality));
    }
    if let Some(speed) = speed {
        println!("estimate: {speed:.2} tokens/s on this device profile");
    }
    if args.layers {
        print!("{}", layers(&found));
    }
    eprintln!("[{:.1} million requests/s]", wanted as f64 / seconds.max(1e-9) / 1e6);
    Ok(())
}

/// The cache at the start of each sequence; with recorded numbers of slots, it is kept as it was then.
fn start_of(args: &ReplayArgs) -> InitialCache {
    if args.recorded_capacity { InitialCache::Carried } else { start(&args.replay) }
}

/// Reroutes the trace with another strategy, if there is one, and returns its quality.
fn reroute_trace(args: &ReplayArgs, trace: &mut Trace, slots: usize) -> Result<Option<Quality>> {
    let Some(routing) = &args.routing else { return Ok(None) };
    let axes = (slots, args.scope.into(), args.replay.scratch);
    let (new, quality) =
        reroute(trace, axes, &args.eviction, &policy_inputs(&args.replay)?, routing, start(&args.replay))?;
    if let Some(path) = &args.trace {
        new.write(path)?;
    }
    *trace = new;
    Ok(Some(quality))
}

/// Replays the trace; the time in seconds does not include preparing its requests.
fn replay(args: &ReplayArgs, trace: &Trace, slots: usize) -> Result<(ReplayResult, f64)> {
    let pieces = match start_of(args) {
        _ if args.recorded_capacity => vec![Requests::as_recorded(trace)],
        InitialCache::Cold => Requests::by_sequence(trace),
        InitialCache::Carried => vec![Requests::all(trace)],
    };
    let inputs = policy_inputs(&args.replay)?;
    pieces.iter().for_each(|requests| drop(requests.policy_inputs(&args.eviction, &inputs)));
    let begin = Instant::now();
    let mut all = ReplayResult::default();
    let (scope, scratch) = (args.scope.into(), args.replay.scratch);
    for requests in &pieces {
        let shape = if args.recorded_capacity {
            requests.recorded_shape(trace, scope, scratch)?
        } else {
            requests.cache_shape(slots, scope, scratch)?
        };
        all.add(&replay_requests(requests, &shape, &args.eviction, &inputs)?);
    }
    Ok((all, begin.elapsed().as_secs_f64()))
}

fn layers(found: &ReplayResult) -> String {
    let mut rows = vec![["layer", "hits", "misses", "hit rate"].map(str::to_owned).to_vec()];
    for (at, row) in found.rows.iter().enumerate() {
        let rate = 100.0 * row.hits as f64 / (row.hits + row.misses).max(1) as f64;
        rows.push(vec![at.to_string(), row.hits.to_string(), row.misses.to_string(), format!("{rate:.2} %")]);
    }
    print::table(&rows)
}

fn numbers(
    args: &ReplayArgs,
    trace: &Trace,
    slots: usize,
    found: &ReplayResult,
    quality: Option<&Quality>,
    speed: Option<f64>,
    seconds: f64,
) -> Value {
    let cost =
        |q: &Quality| json!({"substituted": q.substituted_share(), "kept_mass": q.kept_mass(), "kl": q.mean_kl()});
    let layer = |row: &larder_lab::RowCounts| json!({"hits": row.hits, "misses": row.misses});
    json!({
        "trace": super::trace_json(trace),
        "eviction": args.eviction.to_string(),
        "routing": args.routing.as_ref().map(ToString::to_string),
        "quality": quality.map(cost),
        "slots": (!args.recorded_capacity).then_some(slots),
        "scope": larder_core::CacheScope::from(args.scope).to_string(),
        "scratch": args.replay.scratch,
        "start": start_of(args).to_string(),
        "wanted": found.counts.wanted(),
        "hits": found.counts.hits,
        "misses": found.counts.misses,
        "evictions": found.counts.evictions,
        "rereads": found.counts.rereads,
        "refetches": found.lifetimes.refetches,
        "lifetime": found.lifetimes.mean(),
        "lifetimes": found.lifetimes.length_counts,
        "layers": found.rows.iter().map(layer).collect::<Vec<_>>(),
        "sequence_misses": found.sequences.iter().map(|s| s.misses).collect::<Vec<_>>(),
        "tokens_per_second": speed,
        "requests_per_second": found.counts.wanted() as f64 / seconds.max(1e-9),
    })
}
