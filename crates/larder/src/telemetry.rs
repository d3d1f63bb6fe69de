//! Times and cache counters of each step, as CSV lines, totals and JSON.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use larder_cache::Traffic;
use larder_cache::two_tiers::TierTraffic;
use larder_engine::{PhaseTimes, StepStats};
use larder_os::memory;
use serde_json::{Value, json};

/// The columns of the CSV file. `output_kl` is empty unless the token was decoded twice.
const COLUMNS: &str = "step,phase,tokens,seconds,attention,routing,experts,waiting,computing,other,hits,in_flight_hits,\
                       misses,evictions,demand_bytes,prefetch_bytes,device_busy,peak_bytes,gpu_hits,memory_hits,\
                       gpu_computed,processor_computed,bytes_to_gpu,bytes_from_gpu,output_kl,beside_bytes,\
                       gpu_launches,gpu_waits,gpu_exchanged_bytes,gpu_graphs,gpu_graph_launches";

/// Sums over steps, and writes a CSV line for each if there is a file.
pub struct Telemetry {
    file: Option<(PathBuf, BufWriter<File>)>,
    steps: usize,
    before: Traffic,
    /// Totals of prefill.
    pub prompt: Totals,
    /// Totals of decode.
    pub decode: Totals,
    write_error: Option<std::io::Error>,
}

/// Sums over some steps.
#[derive(Clone, Copy, Default)]
pub struct Totals {
    /// Tokens processed.
    pub tokens: usize,
    /// Wall-clock time.
    pub time: Duration,
    /// Time per phase of a step.
    pub times: PhaseTimes,
    /// Cache traffic.
    pub traffic: Traffic,
    /// Page faults, where they are counted.
    pub page_faults: Option<u64>,
}

impl Telemetry {
    /// Telemetry that writes CSV to `path`, if there is one.
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

    /// Adds a step; `traffic` is the cache traffic since the start.
    pub fn step(&mut self, step: &StepStats, traffic: Option<Traffic>) {
        let now = traffic.unwrap_or_default();
        let passed = now - std::mem::replace(&mut self.before, now);
        let (phase, totals) = match self.steps {
            0 => ("prompt", &mut self.prompt),
            _ => ("decode", &mut self.decode),
        };
        totals.tokens += step.tokens;
        totals.time += step.time;
        totals.times += step.times;
        totals.traffic = totals.traffic + passed;
        if let Some((_, file)) = &mut self.file {
            let line = csv_line(self.steps, phase, step, &passed);
            if let Err(error) = writeln!(file, "{line}") {
                self.write_error.get_or_insert(error);
            }
        }
        self.steps += 1;
    }

    /// Flushes the file, and reports the first write error.
    pub fn finish(&mut self) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        let outcome = self.write_error.take().map_or_else(|| file.flush(), Err);
        outcome.with_context(|| format!("{}: writing the telemetry failed", path.display()))
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
        "{number},{phase},{},{},{},{},{},{},{},{},{:.3},{},{},{},{},{},{},{},{},{},{},{},{},{},{}",
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
        step.loss.mean_kl().map(|kl| format!("{kl:.6}")).unwrap_or_default(),
        passed.beside_bytes,
        tiers.work.launches,
        tiers.work.waits,
        tiers.work.exchanged_bytes,
        tiers.work.graphs,
        tiers.work.graph_launches,
    )
}

impl Totals {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// Bytes read per second.
    pub fn read_rate(&self) -> f64 {
        self.traffic.bytes() as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// The share of the time in which one thread worked and the others had nothing to do.
    pub fn single_thread_share(&self) -> f64 {
        let shared = self.times.pool.within + self.traffic.waited;
        self.time.saturating_sub(shared).as_secs_f64() / self.time.as_secs_f64().max(1e-9)
    }

    /// The totals as JSON; `streaming` says whether there is a cache.
    pub fn json(&self, streaming: bool) -> Value {
        let s = |time: Duration| time.as_secs_f64();
        let Totals { tokens, time, times, traffic, page_faults } = self;
        let counts = traffic.counts;
        let cache = streaming.then(|| {
            json!({
                "hits": counts.hits,
                "in_flight_hits": counts.in_flight_hits,
                "misses": counts.misses,
                "evictions": counts.evictions,
                "rereads": counts.rereads,
                "prefetches": counts.prefetches,
                "useful_prefetches": counts.useful_prefetches,
                "reads_ahead": traffic.reads_ahead.begun,
                "useful_reads_ahead": traffic.reads_ahead.used,
                "certain_reads_ahead": traffic.reads_ahead.certain,
                "small_reads": traffic.small_reads,
                "beside_bytes": traffic.beside_bytes,
                "hit_rate": traffic.hit_rate(),
                "demand_bytes": traffic.demand_bytes,
                "prefetch_bytes": traffic.prefetch_bytes,
                "read_bytes_per_second": self.read_rate(),
                "seconds_waiting": s(traffic.waited),
                "seconds_computing": s(traffic.computed),
                "seconds_checking": s(traffic.checked),
                "seconds_submitting": s(traffic.submitting),
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
            "fork_joins": times.pool.fork_joins,
            "pool_wakeups": times.pool.wakeups,
            "seconds_in_fork_joins": s(times.pool.within),
            "seconds_waiting_at_joins": s(times.pool.waited),
            "single_thread_share": self.single_thread_share(),
            "row_values": times.rows.written,
            "row_values_of_one_thread": times.rows.alone(),
            "page_faults": page_faults,
            "cache": cache,
            "tiers": traffic.tiers.map(|tiers| tiers_json(&tiers, *time)),
        })
    }
}

/// The traffic of two tiers as JSON.
pub fn tiers_json(tiers: &TierTraffic, time: Duration) -> Value {
    let share = |busy: Duration| busy.as_secs_f64() / time.as_secs_f64().max(1e-9);
    let counts = tiers.counts;
    json!({
        "gpu_hits": counts.device_hits,
        "memory_hits": counts.host_hits,
        "in_flight_hits": counts.in_flight_hits,
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
        "copies_ahead": counts.copies_ahead,
        "useful_copies_ahead": counts.useful_copies_ahead,
        "failed_copies": tiers.failed_copies,
        "launches": tiers.work.launches,
        "graphs": tiers.work.graphs,
        "graph_launches": tiers.work.graph_launches,
        "failed_graphs": tiers.work.failed_graphs,
        "waits": tiers.work.waits,
        "exchanged_bytes": tiers.work.exchanged_bytes,
    })
}

#[cfg(test)]
mod tests {
    use larder_engine::OutputLoss;

    use super::*;

    #[test]
    fn a_csv_line_has_a_value_for_every_column() {
        let step = StepStats {
            tokens: 1,
            time: Duration::from_secs(1),
            times: PhaseTimes::default(),
            loss: OutputLoss::default(),
        };
        let line = csv_line(0, "decode", &step, &Traffic::default());
        assert_eq!(line.split(',').count(), COLUMNS.split(',').count());
    }
}
