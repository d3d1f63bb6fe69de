//! What one token of the demo model costs, counted: reads, bytes, evictions, allocations, fork-joins, wake-ups of the
//! thread pool and, where that can be counted, instructions; and the page faults of a prompt. Deterministic counters
//! notice what the noise of a shared machine hides from a measurement of time.
//!
//! Each counter has a recorded value and a tolerance. After a change that moves one on purpose, the failing test prints
//! the line to paste into `RECORDED`.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::cache::gpu::demo;
use crate::support::command;

/// Generated tokens of the two runs whose difference is counted, so that start-up cancels out.
const SHORT: usize = 32;
const LONG: usize = 96;

/// Counter, value per generated token, relative tolerance. Experts that arrive together are computed together, so
/// allocations and instructions depend a little on when reads complete. Instructions were counted with callgrind
/// (`scripts/check/instructions.sh`); no machine with a hardware counter has confirmed them, so their tolerance is
/// wide.
const RECORDED: &[(&str, f64, f64)] = &[
    ("expert reads", 18.875, 0.0),
    ("bytes read", 1546240.0, 0.0),
    ("evictions", 18.875, 0.0),
    ("allocations", 50.25, 0.06),
    ("instructions, avx2", 4436285.0, 0.05),
];

/// Fork-joins per token with two threads: few of experts that arrive together, and most of experts whose halves arrive
/// one by one, each with a check and a computation of its own. There were 52 to 97.
const FORK_JOINS: RangeInclusive<f64> = 38.0..=116.0;
/// Fork-joins per token where all experts are resident.
const FORK_JOINS_RESIDENT: f64 = 41.0;

/// The most allocations per token, and the most more for each expert that is read.
const ALLOCATIONS: [f64; 2] = [50.0, 3.0];
/// The most page faults of a step of a size that was there before.
const FAULTS: f64 = 16.0;
/// The most of the values of a prompt's rows that one thread writes while the others wait.
const ALONE: f64 = 0.02;
/// Tokens of a step whose faults are counted, and steps of a prompt.
const STEP: usize = 512;
const STEPS: usize = 3;

/// Through few slots, with reads in order: on one thread reads and evictions are the same in each run.
const STREAMED: &[&str] = &["--context", "128", "--cache", "8x", "-o", "reader=pread"];

/// One run's counters, from its JSON and from the allocator of the command under test.
struct Run {
    decode: Value,
    allocations: f64,
    instructions: Option<f64>,
}

fn run(tokens: usize, threads: &str, flags: &[&str]) -> Run {
    let mut command = command();
    command.args(["run", "-p", "The old man looked at the door, and", "--json", "-n", &tokens.to_string()]);
    // The text that the recorded values are of.
    command.args(["--temperature", "0.7", "--top-p", "0.9", "--min-p", "0", "--repetition-penalty", "1"]);
    command.args(["--speculate", "off", "--threads", threads]).args(flags);
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

fn number(run: &Run, path: &str) -> f64 {
    run.decode.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}"))
}

/// Counters per generated token: a long run less a short one.
fn per_token([short, long]: &[Run; 2]) -> Vec<(&'static str, f64)> {
    let json = |path: &str| number(long, path) - number(short, path);
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
    let counters = per_token(&[SHORT, LONG].map(|tokens| run(tokens, "1", STREAMED)));
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

fn fork_joins_of(counters: &[(&str, f64)]) -> f64 {
    counters.iter().find(|(counter, _)| *counter == "fork-joins").unwrap().1
}

#[test]
fn a_token_of_resident_experts_makes_as_many_fork_joins_as_are_recorded() {
    let flags = ["--context", "128", "--cache", "all"];
    let [short, long] = [SHORT, LONG].map(|tokens| number(&run(tokens, "2", &flags), "/fork_joins"));
    assert_eq!((long - short) / (LONG - SHORT) as f64, FORK_JOINS_RESIDENT);
}

#[test]
fn a_pool_of_two_wakes_at_most_once_per_fork_join() {
    let runs = [SHORT, LONG].map(|tokens| run(tokens, "2", STREAMED));
    let counters = per_token(&runs);
    println!("per token on two threads: {counters:?}");
    let fork_joins = fork_joins_of(&counters);
    assert!(FORK_JOINS.contains(&fork_joins), "{fork_joins} fork-joins per token");
    // Within a run; how many fork-joins find the other thread awake varies between two runs.
    for Run { decode, .. } in &runs {
        let [fork_joins, wakeups] = ["fork_joins", "pool_wakeups"].map(|name| decode[name].as_u64().unwrap());
        assert!(wakeups <= fork_joins, "{wakeups} wake-ups for {fork_joins} fork-joins");
    }
}

#[test]
fn a_token_allocates_hardly_anything_however_long_its_context() {
    let [resident, of_read] = ALLOCATIONS;
    let all = [SHORT, LONG, 300, 364].map(|tokens| run(tokens, "1", &["--context", "400", "--cache=all"]).allocations);
    let per_token = |short: usize, long: usize| (all[long] - all[short]) / (LONG - SHORT) as f64;
    let (near, far) = (per_token(0, 1), per_token(2, 3));
    println!("allocations per token, all resident: {near} near the start, {far} behind 300 tokens");
    assert!(near <= resident && far <= resident, "{near} and {far} per token");
    let streamed = self::per_token(&[SHORT, LONG].map(|tokens| run(tokens, "1", STREAMED)));
    let of = |name: &str| streamed.iter().find(|(counter, _)| *counter == name).expect("it is counted").1;
    let (allocations, reads) = (of("allocations"), of("expert reads"));
    assert!(allocations <= resident + of_read * reads, "{allocations} per token that reads {reads} experts");
}

/// The prompts of some runs of `larder bench` on two threads, all in memory.
fn prompts(runs: usize, tokens: usize) -> Vec<Value> {
    let (mut command, [runs, tokens]) = (command(), [runs, tokens].map(|number| number.to_string()));
    command.args(["bench", "-m", &demo(), "--json", "--first-token", "off", "--threads", "2", "--cache=all"]);
    command.args(["-r", &runs, "-n", "8", "-p", &tokens, "-o", &format!("prefill-tokens={STEP}")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut bench: Value = serde_json::from_slice(&output.stdout).unwrap();
    bench["series"][0]["runs"].as_array_mut().unwrap().iter_mut().map(|run| run["prompt"].take()).collect()
}

#[test]
fn a_step_of_a_known_size_takes_no_page_faults() {
    let of_runs = prompts(3, STEPS * STEP).into_iter().map(|prompt| prompt["page_faults"].as_f64());
    let Some(faults) = of_runs.collect::<Option<Vec<f64>>>() else {
        return println!("skipped: the system does not say how many page faults there were");
    };
    println!("page faults of prompts of {STEPS} steps: {faults:?}");
    assert!(faults[2] <= FAULTS * STEPS as f64, "{} in {STEPS} steps", faults[2]);
    assert!(faults[0] > faults[2], "the first run finds its memory untouched");
}

#[test]
fn rows_of_a_prompt_are_written_by_all_threads() {
    let prompt = prompts(1, 2 * STEP).remove(0);
    let [written, alone] =
        ["row_values", "row_values_of_one_thread"].map(|name| prompt[name].as_f64().expect("it is counted"));
    println!("values of rows of a prompt: {written}, by one thread {alone}");
    assert!(alone <= ALONE * written, "one thread writes {:.3} of all values of rows", alone / written);
    let (share, least) = (prompt["single_thread_share"].as_f64().unwrap(), (2 * STEP * 256) as f64);
    assert!((0.0..1.0).contains(&share) && written > least, "{prompt}");
}
