//! What one token of the demo model costs, counted: reads, bytes, evictions, allocations, fork-joins, wake-ups of the thread pool
//! and, where that can be counted, instructions. Deterministic counters notice what the noise of a shared machine hides
//! from a measurement of time.
//!
//! Each counter has a recorded value and a tolerance. After a change that moves one on purpose, the failing test prints
//! the line to paste into `RECORDED`.

use serde_json::Value;

use crate::support::command;

/// Generated tokens of the two runs whose difference is counted, so that start-up cancels out.
const SHORT: usize = 32;
const LONG: usize = 96;

/// Counter, value per generated token, relative tolerance. Experts that arrive together are computed together, so allocations
/// and instructions depend a little on when reads complete.
/// Instructions were counted with callgrind (`scripts/check/instructions.sh`); no machine with a hardware counter has
/// confirmed them, so their tolerance is wide.
const RECORDED: &[(&str, f64, f64)] = &[
    ("expert reads", 19.703125, 0.0),
    ("bytes read", 1614080.0, 0.0),
    ("evictions", 19.703125, 0.0),
    ("allocations", 374.75, 0.06),
    ("instructions, avx2", 4436285.0, 0.05),
];

/// The most fork-joins per token with two threads: those of experts that arrive one by one. There were 55 to 59.
const FORK_JOINS: f64 = 76.40625;

/// On one thread with reads in order, reads and evictions are the same in each run.
const DETERMINISTIC: &[&str] = &["--threads", "1", "--reader", "pread"];

/// One run's counters, from its JSON and from the allocator of the command under test.
struct Run {
    decode: Value,
    allocations: f64,
    instructions: Option<f64>,
}

fn run(tokens: usize, flags: &[&str]) -> Run {
    let mut command = command();
    command.args(["run", "-p", "The old man looked at the door, and", "--json", "-n", &tokens.to_string()]);
    // The text that the recorded values are of.
    command.args(["--temperature", "0.7", "--top-p", "0.9", "--min-p", "0", "--repetition-penalty", "1"]);
    command.args(["--context", "128", "--cache-experts", "8", "--speculate", "off"]).args(flags);
    let output = command.env("LARDER_COUNT_FROM", "1").env("LARDER_COUNT_INSTRUCTIONS", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let counted = |name: &str| stderr.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let mut all: Value = serde_json::from_slice(&output.stdout).unwrap();
    Run {
        decode: all["decode"].take(),
        allocations: counted("allocations:").expect("the command under test counts allocations"),
        instructions: counted("instructions:"),
    }
}

/// Counters per generated token: a long run less a short one.
fn per_token([short, long]: &[Run; 2]) -> Vec<(&'static str, f64)> {
    let json = |path: &str| {
        let number =
            |run: &Run| run.decode.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}"));
        number(long) - number(short)
    };
    let mut counters = vec![
        ("expert reads", json("/cache/misses")),
        ("bytes read", json("/cache/demand_bytes")),
        ("evictions", json("/cache/evictions")),
        ("fork-joins", json("/fork_joins")),
        ("pool wake-ups", json("/pool_wakeups")),
        ("allocations", long.allocations - short.allocations),
    ];
    if let (Some(long), Some(short)) = (long.instructions, short.instructions) {
        counters.push((instructions_of(), long - short));
    }
    counters.into_iter().map(|(name, count)| (name, count / (LONG - SHORT) as f64)).collect()
}

/// Instructions are recorded for each instruction set; others are counted and printed only.
fn instructions_of() -> &'static str {
    match larder_kernels::instruction_set() {
        "avx2" => "instructions, avx2",
        _ => "instructions, other",
    }
}

#[test]
fn a_token_costs_what_is_recorded() {
    let counters = per_token(&[SHORT, LONG].map(|tokens| run(tokens, DETERMINISTIC)));
    println!("per token on one thread: {counters:?}");
    for (name, recorded, tolerance) in RECORDED {
        let Some((_, count)) = counters.iter().find(|(counter, _)| counter == name) else {
            println!("skipped: {name}: the processor or the kernel does not count them (perf_event_open)");
            continue;
        };
        let off = (count - recorded).abs() / recorded.max(1.0);
        assert!(
            off <= *tolerance,
            "{name}: {count} per token instead of {recorded}; if meant:\n    (\"{name}\", {count:?}, {tolerance:?}),"
        );
    }
}

#[test]
fn a_pool_of_two_wakes_at_most_once_per_fork_join() {
    let runs = [SHORT, LONG].map(|tokens| run(tokens, &["--threads", "2", "--reader", "pread"]));
    let counters = per_token(&runs);
    println!("per token on two threads: {counters:?}");
    let (_, fork_joins) = counters.iter().find(|(counter, _)| *counter == "fork-joins").unwrap();
    assert!((FORK_JOINS / 2.0..=FORK_JOINS).contains(fork_joins), "{fork_joins} fork-joins per token");
    // Within a run; how many fork-joins find the other thread awake varies between two runs.
    for Run { decode, .. } in &runs {
        let [fork_joins, wakeups] = ["fork_joins", "pool_wakeups"].map(|name| decode[name].as_u64().unwrap());
        assert!(wakeups <= fork_joins, "{wakeups} wake-ups for {fork_joins} fork-joins");
    }
}
