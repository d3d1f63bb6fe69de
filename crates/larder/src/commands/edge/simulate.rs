//! `larder edge simulate`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use larder_edge::placement::simulate::{self, Sweep};
use larder_edge::placement::{ALGORITHMS, Algorithm, Scenario};
use parking_lot::Mutex;
use serde_json::json;

use super::report::{self, PlacementComparison, SimulationRun};
use crate::cli::edge::SimulateArgs;
use crate::report_origin::report_origin;
use crate::{output, print, progress};

/// Compares placement algorithms in simulated networks.
pub fn run(args: &SimulateArgs) -> Result<()> {
    let sweeps = chosen(args)?;
    let (page, csv) = files(&args.out)?;
    for file in [&page, &csv] {
        output::check(file, args.replace.force)?;
    }
    let runs = all_runs(args, &sweeps)?;
    output::write(&csv, report::csv(&sweeps, &runs))?;
    let text = report::page(args.seed, args.repeats, &sweeps, &runs, &report_origin(args.threads, None));
    output::write(&page, text)?;
    let found = report::comparisons(&sweeps, &runs);
    if args.json {
        println!(
            "{}",
            json!({"page": page, "csv": csv, "runs": runs.len(), "compared": found.iter().map(as_json).collect::<Vec<_>>()})
        );
        return Ok(());
    }
    if !found.is_empty() {
        println!(
            "4 servers with 2.5 GB each, 20 users, mean of {}:",
            print::count(args.repeats, "network", "networks")
        );
        print!("{}", print::table(&report::compared(&found)));
    }
    println!("{}: {} runs; {}", page.display(), runs.len(), csv.display());
    Ok(())
}

fn as_json(row: &PlacementComparison) -> serde_json::Value {
    json!({
        "algorithm": row.name,
        "latency_s": row.seconds,
        "latency_per_layer_s": row.per_layer,
        "accelerated_below": row.below,
        "running_s": row.running,
    })
}

/// All sweeps, or those of the named figures.
fn chosen(args: &SimulateArgs) -> Result<Vec<Sweep>> {
    let all = simulate::sweeps(&Scenario::default());
    let figures: Vec<&str> = all.iter().flat_map(|sweep| [sweep.latency_figure, sweep.time_figure]).flatten().collect();
    if let Some(unknown) = args.figures.iter().find(|name| !figures.contains(&name.as_str())) {
        bail!("there is no figure {unknown}; the figures are {}", figures.join(", "));
    }
    let wanted = |figure: Option<&str>| figure.is_some_and(|figure| args.figures.iter().any(|name| name == figure));
    Ok(all
        .into_iter()
        .filter(|s| args.figures.is_empty() || wanted(s.latency_figure) || wanted(s.time_figure))
        .collect())
}

/// The paths of the page and of the CSV file.
fn files(out: &Path) -> Result<(PathBuf, PathBuf)> {
    if out.extension().is_some_and(|e| e.eq_ignore_ascii_case("html")) {
        return Ok((out.to_owned(), out.with_extension("csv")));
    }
    std::fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    Ok((out.join("report.html"), out.join("runs.csv")))
}

/// The algorithms to run in a sweep: reference algorithms only where they can be compared with the paper, and none that
/// takes the best placement of others.
fn algorithms(sweep: &Sweep) -> Vec<(usize, &'static Algorithm)> {
    const ALL: &[Algorithm] = &ALGORITHMS;
    let runs = |a: &Algorithm| (sweep.name == report::PAPER_SWEEP || !a.reference) && !a.is_best_of_others();
    ALL.iter().enumerate().filter(|(_, a)| runs(a)).collect()
}

fn all_runs(args: &SimulateArgs, sweeps: &[Sweep]) -> Result<Vec<SimulationRun>> {
    let networks: Vec<(usize, usize, usize)> = (0..args.repeats)
        .flat_map(|repetition| {
            let points = sweeps.iter().enumerate();
            points.flat_map(move |(s, sweep)| (0..sweep.points.len()).map(move |p| (s, p, repetition)))
        })
        .collect();
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let total: usize = networks.iter().map(|(s, _, _)| algorithms(&sweeps[*s]).len()).sum();
    let bar = progress::count("simulating", "runs", total as u64);
    let (next, runs) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || -> Result<()> {
        while let Some((s, p, repetition)) = networks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = network(args.seed, &sweeps[*s], (*s, *p, *repetition))?;
            bar.advance(found.len() as u64);
            runs.lock().extend(found);
        }
        Ok(())
    };
    let done: Result<Vec<()>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.min(networks.len())).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("no simulation thread panics")).collect()
    });
    bar.finish();
    done?;
    let mut runs: Vec<SimulationRun> = runs.into_inner();
    runs.sort_by_key(|run| (run.sweep, run.point, run.repetition, run.algorithm));
    Ok(runs)
}

/// Runs all algorithms on one network.
fn network(seed: u64, sweep: &Sweep, (s, point, repetition): (usize, usize, usize)) -> Result<Vec<SimulationRun>> {
    let problem = simulate::problem(&sweep.points[point].1, seed, repetition as u64)?;
    let run = |(at, algorithm): (usize, &Algorithm)| {
        let start = Instant::now();
        let placement = algorithm.place(&problem, seed);
        let seconds = start.elapsed().as_secs_f64();
        let outcome = simulate::outcome(&problem, algorithm, &placement);
        SimulationRun { sweep: s, point, repetition, algorithm: at, outcome, seconds }
    };
    Ok(algorithms(sweep).into_iter().map(run).collect())
}
