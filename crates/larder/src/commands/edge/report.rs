//! The results of a simulation, as CSV and as a page.

use std::fmt::Write;

use larder_edge::placement::ALGORITHMS;
use larder_edge::placement::simulate::{PlacementOutcome, Sweep};
use larder_lab::report::{Chart, Line, Page, Style, Table, chart_group, group, paragraph};
use larder_lab::{Fact, ReportOrigin};

/// Algorithms whose running times are drawn; the others take almost none.
const TIMED: [&str; 4] = ["accelerated", "dp", "greedy", "greedy-gain"];

/// Where the paper states numbers: the sweep, the GB of a server, and by how many percent its algorithm is below
/// others.
pub const PAPER_SWEEP: &str = "storage";
const PAPER_STORAGE_GB: f64 = 2.5;
const PAPER_RESULTS: [(&str, f64); 2] = [("greedy-gain", 16.7), ("lfu", 19.5)];

/// One algorithm on one network.
#[derive(Clone, Debug)]
pub struct SimulationRun {
    /// Index of the sweep, and of the point in it.
    pub sweep: usize,
    pub point: usize,
    pub repetition: usize,
    /// Index in [`ALGORITHMS`].
    pub algorithm: usize,
    pub outcome: PlacementOutcome,
    /// Running time of the algorithm in seconds.
    pub seconds: f64,
}

/// One algorithm compared with the accelerated one.
pub struct PlacementComparison {
    pub name: &'static str,
    /// Seconds per token.
    pub seconds: f64,
    pub per_layer: f64,
    /// By which share the accelerated algorithm is faster: mean, minimum and maximum over networks.
    pub below: Option<[f64; 3]>,
    /// Running time of the algorithm in seconds.
    pub running: f64,
    /// Seconds per token if the model were split by layers.
    pub once: Option<f64>,
}

/// One line per run.
pub fn csv(sweeps: &[Sweep], runs: &[SimulationRun]) -> String {
    let mut out =
        String::from("sweep,x,repetition,algorithm,latency_s,latency_per_layer_s,cloud_share,once_s,running_s\n");
    for run in runs {
        let (sweep, o) = (&sweeps[run.sweep], &run.outcome);
        let _ = writeln!(
            out,
            "{},{},{},{},{:.9},{:.9},{:.6},{},{:.6}",
            sweep.name,
            sweep.points[run.point].0,
            run.repetition,
            ALGORITHMS[run.algorithm].name,
            o.seconds,
            o.seconds / o.layers,
            o.cloud,
            o.split_inference_seconds.map_or(String::new(), |once| format!("{once:.9}")),
            run.seconds
        );
    }
    out
}

/// The algorithms at the point for which the paper states numbers; empty if it was not simulated.
pub fn comparisons(sweeps: &[Sweep], runs: &[SimulationRun]) -> Vec<PlacementComparison> {
    let Some(s) = sweeps.iter().position(|sweep| sweep.name == PAPER_SWEEP) else { return Vec::new() };
    let here = |run: &&SimulationRun| run.sweep == s && sweeps[s].points[run.point].0 == PAPER_STORAGE_GB;
    let of = |name: &str| -> Vec<&SimulationRun> {
        runs.iter().filter(here).filter(|run| ALGORITHMS[run.algorithm].name == name).collect()
    };
    let ours = of("accelerated");
    let row = |name: &'static str| {
        let found = of(name);
        let mean = |value: &dyn Fn(&SimulationRun) -> f64| {
            found.iter().map(|run| value(run)).sum::<f64>() / found.len() as f64
        };
        let each: Vec<f64> =
            ours.iter().zip(&found).map(|(ours, run)| 1.0 - ours.outcome.seconds / run.outcome.seconds).collect();
        let mean_below = each.iter().sum::<f64>() / each.len() as f64;
        let ends = [each.iter().copied().fold(f64::INFINITY, f64::min), each.iter().copied().fold(-1.0, f64::max)];
        PlacementComparison {
            name,
            seconds: mean(&|run| run.outcome.seconds),
            per_layer: mean(&|run| run.outcome.seconds / run.outcome.layers),
            below: (name != "accelerated").then_some([mean_below, ends[0], ends[1]]),
            running: mean(&|run| run.seconds),
            once: found[0]
                .outcome
                .split_inference_seconds
                .map(|_| mean(&|run| run.outcome.split_inference_seconds.unwrap_or(0.0))),
        }
    };
    ALGORITHMS.iter().filter(|a| !a.is_best_of_others()).map(|a| row(a.name)).collect()
}

/// The same as a table.
pub fn compared(rows: &[PlacementComparison]) -> Vec<Vec<String>> {
    let head = ["algorithm", "ms per token", "ms a layer", "accelerated is below by", "paper", "running"];
    let row = |row: &PlacementComparison| {
        let percent = |share: f64| format!("{:.1}", 100.0 * share);
        let below =
            row.below.map(|[mean, low, high]| format!("{} % ({} to {})", percent(mean), percent(low), percent(high)));
        let stated = PAPER_RESULTS.iter().find(|(name, _)| *name == row.name).map(|(_, n)| format!("{n} %"));
        vec![
            row.name.to_owned(),
            format!("{:.1}", 1e3 * row.seconds),
            format!("{:.2}", 1e3 * row.per_layer),
            below.unwrap_or_default(),
            stated.unwrap_or_default(),
            format!("{:.3} s", row.running),
        ]
    };
    std::iter::once(head.map(str::to_owned).to_vec()).chain(rows.iter().map(row)).collect()
}

/// The page with all figures.
pub fn page(seed: u64, repeats: usize, sweeps: &[Sweep], runs: &[SimulationRun], made: &ReportOrigin) -> String {
    let mut body = String::new();
    let found = comparisons(sweeps, runs);
    if !found.is_empty() {
        let title = format!("At {PAPER_STORAGE_GB} GB");
        let once = found.iter().find_map(|row| row.once).map(|once| paragraph(&brackets(once))).unwrap_or_default();
        body += &group(&title, &(Table::plain(&title, &compared(&found)).html() + &once));
    }
    let latency = |(s, sweep): (usize, &Sweep)| {
        let all = |name: &str| name != "dp";
        Some(chart(sweep, s, runs, sweep.latency_figure?, "ms per token", &all, &|run| 1e3 * run.outcome.seconds))
    };
    let time = |(s, sweep): (usize, &Sweep)| {
        let timed = |name: &str| TIMED.contains(&name);
        Some(chart(sweep, s, runs, sweep.time_figure?, "seconds", &timed, &|run| run.seconds))
    };
    let charts: Vec<Chart> = sweeps.iter().enumerate().filter_map(latency).collect();
    body += &group("Latency", &chart_group(&charts));
    let charts: Vec<Chart> = sweeps.iter().enumerate().filter_map(time).collect();
    body += &group("Running time", &chart_group(&charts));
    Page {
        title: "Experts on several machines",
        lead: "Servers that store some experts, users whose devices store a few, and a cloud that stores all: the setting of \
               the SlimCaching paper.",
        made,
        method: &[
            Fact::new("Runs", format!("each point is the mean of {repeats} random networks, seed {seed}")),
            Fact::new(
                "Fixed values",
                "where a figure does not vary them: 4 servers with 5 GB, 20 users at 5 MHz, 200 experts on a device, 18 \
                 models with 3872 experts",
            ),
            Fact::new(
                "Choices made here",
                "because the paper leaves them open: how often each of its seven models occurs, two bytes per number, how \
                 unevenly models and experts are requested, and random positions of servers and users",
            ),
        ],
    }
    .html(&body)
}

/// What the comparison's brackets and algorithms are; `once` is the latency of split inference in seconds.
fn brackets(once: f64) -> String {
    format!(
        "In brackets: minimum and maximum over networks. 'greedy' is the paper's Algorithm 1, which divides gain by bytes; \
         'greedy-gain' is the one that its experiments describe, which does not. Latencies add up over the layers of a \
         model, as each layer may send a request; split inference, whose hidden state leaves the device once, would take \
         {:.1} ms per token.",
        1e3 * once
    )
}

/// One figure, with a curve for each algorithm.
fn chart(
    sweep: &Sweep,
    s: usize,
    runs: &[SimulationRun],
    figure: &str,
    y: &str,
    shown: &dyn Fn(&str) -> bool,
    value: &dyn Fn(&SimulationRun) -> f64,
) -> Chart {
    let line = |(at, name): (usize, &'static str)| {
        let point = |(p, (x, _)): (usize, &(f64, _))| {
            let here = runs.iter().filter(|run| (run.sweep, run.point, run.algorithm) == (s, p, at));
            let values: Vec<f64> = here.map(value).collect();
            let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
            (!values.is_empty()).then_some((*x, mean, None))
        };
        // Different styles, because these two curves nearly coincide.
        let style = match name {
            "accelerated" => Style::Strong,
            "greedy" => Style::Dashed,
            _ => Style::Plain,
        };
        Line {
            name: name.into(),
            color: at + 1,
            style,
            points: sweep.points.iter().enumerate().filter_map(point).collect(),
        }
    };
    let run = ALGORITHMS.iter().enumerate().filter(|(_, a)| !a.is_best_of_others());
    let names = run.map(|(at, a)| (at, a.name)).filter(|(_, name)| shown(name));
    Chart {
        title: format!("Figure {figure}: {y}, by {}", sweep.name),
        x: sweep.x_label.into(),
        y: y.into(),
        lines: names.map(line).collect(),
        percent: false,
        y_range: Some((0.0, 0.0)),
    }
}
