//! Where each token's time went and what was read for it.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use larder_cache::Traffic;
use larder_cache::tiers::TierTraffic;
use larder_engine::{PhaseTimes, StepStats};
use serde_json::{Value, json};

use crate::memory;

/// The columns of the file.
const COLUMNS: &str = "step,phase,tokens,seconds,attention,routing,experts,waiting,computing,other,hits,awaited,misses,\
                       evictions,demanded_bytes,guessed_bytes,device_busy,peak_bytes,gpu_hits,memory_hits,gpu_computed,\
                       processor_computed,bytes_to_gpu,bytes_from_gpu";

/// Adds up what passes, and writes a line for each step if that is wanted.
pub struct Telemetry {
    file: Option<(PathBuf, BufWriter<File>)>,
    steps: usize,
    before: Traffic,
    /// The prompt's step.
    pub prompt: Totals,
    /// All others.
    pub decode: Totals,
    write_error: Option<std::io::Error>,
}

/// The sum over some steps.
#[derive(Clone, Copy, Default)]
pub struct Totals {
    /// Tokens that were read.
    pub tokens: usize,
    /// How long it took.
    pub time: Duration,
    /// On what.
    pub times: PhaseTimes,
    /// What passed through the cache.
    pub traffic: Traffic,
}

impl Telemetry {
    /// Writes to `path` if there is one.
    pub fn new(path: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| -> Result<_> {
            let mut file = BufWriter::new(File::create(path).with_context(|| path.display().to_string())?);
            writeln!(file, "{COLUMNS}").with_context(|| path.display().to_string())?;
            Ok((path.to_owned(), file))
        };
        let file = path.map(open).transpose()?;
        let (prompt, decode) = Default::default();
        Ok(Telemetry { file, steps: 0, before: Traffic::default(), prompt, decode, write_error: None })
    }

    /// A step is over; `traffic` is what passed through the cache so far.
    pub fn step(&mut self, step: &StepStats, traffic: Option<Traffic>) {
        let now = traffic.unwrap_or_default();
        let passed = now - std::mem::replace(&mut self.before, now);
        let (phase, totals) = match self.steps {
            0 => ("prompt", &mut self.prompt),
            _ => ("decode", &mut self.decode),
        };
        totals.tokens += step.tokens;
        totals.time += step.time;
        totals.times = totals.times + step.times;
        totals.traffic = totals.traffic + passed;
        if let Some((_, file)) = &mut self.file {
            let line = csv_line(self.steps, phase, step, &passed);
            if let Err(error) = writeln!(file, "{line}") {
                self.write_error.get_or_insert(error);
            }
        }
        self.steps += 1;
    }

    /// Makes sure that the file is whole.
    pub fn finish(&mut self) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let outcome = self.write_error.take().map_or_else(|| file.flush(), Err);
        outcome.with_context(|| format!("{}: the telemetry could not be written", path.display()))
    }
}

fn csv_line(number: usize, phase: &str, step: &StepStats, passed: &Traffic) -> String {
    let s = |time: Duration| time.as_secs_f64();
    let tiers = passed.tiers.unwrap_or_default();
    let (times, counts) = (step.times, passed.counts);
    let seconds = [
        step.time,
        times.mixing,
        times.routing,
        times.experts,
        passed.waited,
        passed.computed,
        step.time.saturating_sub(times.mixing + times.routing + times.experts),
    ];
    let seconds: Vec<String> = seconds.iter().map(|t| format!("{:.6}", s(*t))).collect();
    format!(
        "{number},{phase},{},{},{},{},{},{},{},{},{:.3},{},{},{},{},{},{},{}",
        step.tokens,
        seconds.join(","),
        counts.hits,
        counts.in_flight_hits,
        counts.misses,
        counts.evictions,
        passed.demand_bytes,
        passed.prefetch_bytes,
        s(passed.read_busy) / s(step.time).max(1e-9),
        memory::peak().unwrap_or_default(),
        tiers.counts.device_hits,
        tiers.counts.host_hits,
        tiers.on_device,
        tiers.on_host,
        tiers.to_device_bytes,
        tiers.from_device_bytes,
    )
}

impl Totals {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// For a program.
    pub fn json(&self, streaming: bool) -> Value {
        let s = |time: Duration| time.as_secs_f64();
        let Totals { tokens, time, times, traffic } = self;
        let counts = traffic.counts;
        let cache = streaming.then(|| {
            json!({
                "hits": counts.hits,
                "awaited": counts.in_flight_hits,
                "misses": counts.misses,
                "evictions": counts.evictions,
                "rereads": counts.rereads,
                "guesses": counts.prefetches,
                "useful_guesses": counts.useful_prefetches,
                "hit_rate": traffic.hit_rate(),
                "demanded_bytes": traffic.demand_bytes,
                "guessed_bytes": traffic.prefetch_bytes,
                "seconds_waiting": s(traffic.waited),
                "seconds_computing": s(traffic.computed),
                "device_busy": s(traffic.read_busy) / s(*time).max(1e-9),
            })
        });
        json!({
            "tokens": tokens,
            "seconds": s(*time),
            "seconds_attention": s(times.mixing),
            "seconds_routing": s(times.routing),
            "seconds_experts": s(times.experts),
            "seconds_other": s(time.saturating_sub(times.mixing + times.routing + times.experts)),
            "seconds_products": s(times.products),
            "seconds_attending": s(times.attention),
            "cache": cache,
            "tiers": traffic.tiers.map(|tiers| tiers_json(&tiers, *time)),
        })
    }
}

/// For a program.
fn tiers_json(tiers: &TierTraffic, time: Duration) -> Value {
    let share = |busy: Duration| busy.as_secs_f64() / time.as_secs_f64().max(1e-9);
    let counts = tiers.counts;
    json!({
        "gpu_hits": counts.device_hits,
        "memory_hits": counts.host_hits,
        "awaited": counts.in_flight_hits,
        "misses": counts.misses,
        "gpu_computed": tiers.on_device,
        "processor_computed": tiers.on_host,
        "promotions": counts.promotions,
        "demotions": counts.demotions,
        "kept_in_memory": counts.free_demotions,
        "left_both": counts.evictions,
        "bytes_to_gpu": tiers.to_device_bytes,
        "bytes_from_gpu": tiers.from_device_bytes,
        "link_in_busy": share(tiers.to_device_busy),
        "link_out_busy": share(tiers.from_device_busy),
        "failed_copies": tiers.failed_copies,
    })
}
