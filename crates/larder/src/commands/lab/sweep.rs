//! `larder lab sweep`.

use std::time::Instant;

use anyhow::{Error, Result, bail};
use larder_core::Trace;
use larder_lab::report::{SweepReport, sweep_csv, sweep_page};
use larder_lab::{InitialCache, ReplaySweep, Requests, SweepAxes, SweepCell, eighths};
use larder_policy::eviction::{EvictionSpec, PolicyInputs, compared_specs};

use super::{heat, load, policy_inputs, start, summary};
use crate::cli::lab::LabSweepArgs;
use crate::report_origin::report_origin;
use crate::{output, print, progress};

/// Compares eviction policies over many cache sizes.
pub fn run(args: &LabSweepArgs) -> Result<()> {
    let profile = args.replay.profile.profile().map_err(Error::msg)?;
    let trace = load(&args.input)?;
    let inputs = policy_inputs(&args.replay)?;
    let start = start(&args.replay);
    let policies = policies(args, &trace, &inputs)?;
    let begin = Instant::now();
    let cells = replay(args, &trace, &policies, &inputs, start)?;
    let seconds = begin.elapsed().as_secs_f64();
    let drive = args.input.traces.first().map(|path| path.as_path());
    let outcome = SweepReport::new(report_origin(args.threads, drive), &trace, start, &cells, profile);
    if let Some(path) = &args.csv {
        sweep_csv(&outcome, path)?;
    }
    if let Some(path) = &args.html {
        let heats = heat::draw(&args.heat, &trace, &inputs)?;
        output::write(path, sweep_page(&outcome, &heats))?;
    }
    if args.json {
        println!("{}", outcome.to_json());
        return Ok(());
    }
    println!("{}, {start}", summary(&trace));
    for scope in outcome.scopes() {
        println!(
            "\nscope {scope}: misses in %; in brackets, the share of the gap from lru to belady (best possible) that is closed"
        );
        print!("{}", table(&outcome, scope));
    }
    let requests: u64 = cells.iter().map(|c| c.replayed.counts.wanted()).sum();
    eprintln!("[{requests} requests in {seconds:.1} s, {:.1} million/s]", requests as f64 / seconds.max(1e-9) / 1e6);
    Ok(())
}

/// The requested policies, or all that need nothing but the trace.
fn policies(args: &LabSweepArgs, trace: &Trace, inputs: &PolicyInputs) -> Result<Vec<EvictionSpec>> {
    if !args.eviction.is_empty() {
        return Ok(args.eviction.clone());
    }
    let requests = Requests::all(trace);
    let shape = requests.cache_shape(1, larder_core::CacheScope::Layer, args.replay.scratch)?;
    let can: Vec<EvictionSpec> =
        compared_specs().filter(|spec| spec.make(&shape, &requests.policy_inputs(spec, inputs)).is_ok()).collect();
    if can.is_empty() { bail!("no policy works on this trace alone; name one with --eviction") } else { Ok(can) }
}

fn replay(
    args: &LabSweepArgs,
    trace: &Trace,
    policies: &[EvictionSpec],
    inputs: &PolicyInputs,
    start: InitialCache,
) -> Result<Vec<SweepCell>> {
    let slots = if args.cache.is_empty() { eighths(trace.experts) } else { args.cache.clone() };
    let axes = SweepAxes {
        policies,
        routings: &args.routing,
        slots: &slots,
        scopes: args.scope.scopes(),
        scratch: args.replay.scratch,
    };
    let sweep = ReplaySweep::new(trace, &axes, inputs, start)?.part(args.part);
    let bar = progress::count("replaying", "requests", sweep.work());
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let cells = sweep.run(threads, &|requests| bar.advance(requests));
    bar.finish();
    Ok(cells?)
}

/// A table of policies (rows) and cache sizes (columns).
fn table(outcome: &SweepReport, scope: &str) -> String {
    let capacities = outcome.capacities();
    let mut rows = vec![vec!["slots per layer".to_owned()]];
    rows[0].extend(capacities.iter().map(usize::to_string));
    for policy in outcome.policies() {
        let cell = |slots: &usize| {
            let Some(row) = outcome.row(policy, scope, *slots) else { return String::new() };
            let misses = 100.0 * row.miss_rate();
            match row.gap_closed.filter(|_| !matches!(policy, "lru" | "belady")) {
                Some(gap) => format!("{misses:.2} ({:>4.0})", 100.0 * gap.value),
                None => format!("{misses:.2}       "),
            }
        };
        rows.push(std::iter::once(policy.to_owned()).chain(capacities.iter().map(cell)).collect());
    }
    print::table(&rows)
}
