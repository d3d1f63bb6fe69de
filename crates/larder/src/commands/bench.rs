//! `larder bench`: prefill and decode speed, next to the limits of the machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_engine::{PhaseTimes, Sampler, Sampling, Session, TokenInput, Xoshiro256};
use larder_runtime::machine::rates;
use larder_runtime::{EngineExperts, InferenceEngine, OnGpu, OpenModel, expert_sizes};
use larder_store::Store;
use serde_json::{Value, json};

use crate::cli::{BenchArgs, EngineFlags};
use crate::models;
use crate::print;
use crate::telemetry::Totals;

/// Measures prefill and decode, and how near they come to what memory, SSD and GPU allow.
pub fn run(args: &BenchArgs) -> Result<()> {
    if args.vs_resident && args.engine.place.device.is_gpu() {
        bail!(
            "--vs-resident holds all experts in main memory and does not work with --device; --vram-experts sets how many \
             experts are in VRAM"
        );
    }
    let model = models::open_to_run(&args.model, args.engine.no_store)?;
    let need = args.prompt.saturating_add(args.tokens);
    if need > model.blueprint.context {
        bail!(
            "{need} tokens do not fit into the model's context of {}; lower --prompt or --tokens",
            model.blueprint.context
        );
    }
    let limits = Limits::measure(&model, &args.engine)?;
    let mut engine = InferenceEngine::start(&model, &args.engine.options(need))?;
    let limits = Limits { gpu: engine.gpu, ..limits };
    let mut series = vec![("as planned", measure(&mut engine, args)?)];
    if args.vs_resident {
        engine.all_resident(&model)?;
        series.push(("all in memory", measure(&mut engine, args)?));
    }
    if args.json {
        let rows: Vec<Value> =
            series.iter().map(|(name, runs)| json!({"name": name, "runs": rows(runs, &limits)})).collect();
        println!("{}", json!({"limits": limits.json(), "plan": engine.plan, "series": rows}));
        return Ok(());
    }
    println!("{}", limits.describe());
    print!("{}", print::table(&table(&series, &limits)));
    Ok(())
}

/// Throughput of the machine in bytes per second, measured in this run.
struct Limits {
    memory: f64,
    ssd: Option<f64>,
    gpu: Option<OnGpu>,
    /// Bytes of the resident weights that every token reads.
    resident: f64,
    /// Bytes of one expert, on average over the layers.
    expert: f64,
    /// Number of experts that every token uses, over all layers.
    experts: f64,
}

impl Limits {
    fn measure(model: &OpenModel, flags: &EngineFlags) -> Result<Self> {
        let ssd = |store: &Arc<Store>| rates::ssd_throughput(store, &flags.performance.reader).map(|(rate, _)| rate);
        let geometry = &model.blueprint.geometry;
        Ok(Limits {
            memory: rates::memory_bandwidth(flags.threads()),
            ssd: model.store().map(ssd).transpose()?,
            gpu: None,
            resident: model.resident_bytes_per_token()? as f64,
            expert: expert_sizes(model)?.mean() as f64,
            experts: (geometry.top_k * geometry.moe_layers.len()) as f64,
        })
    }

    /// Bytes that every token reads, from any tier.
    fn bytes_per_token(&self) -> f64 {
        self.resident + self.experts * self.expert
    }

    /// The shortest time in seconds that decode could have taken on each link, by the link's name.
    fn least_seconds(&self, run: &BenchRun) -> Vec<(&'static str, f64)> {
        let Totals { tokens, traffic, .. } = run.decode;
        let ssd = self.ssd.map(|rate| ("SSD", traffic.bytes() as f64 / rate));
        let (Some(gpu), Some(tiers)) = (self.gpu, traffic.tiers) else {
            let memory = tokens as f64 * self.bytes_per_token() / self.memory;
            return [("memory", memory)].into_iter().chain(ssd).collect();
        };
        let on_gpu = tokens as f64 * gpu.resident_bytes as f64 + tiers.on_device as f64 * self.expert;
        let here = [
            ("VRAM", on_gpu / gpu.throughput.vram),
            ("to the GPU", tiers.to_device_bytes as f64 / gpu.throughput.link_in),
            ("from the GPU", tiers.from_device_bytes as f64 / gpu.throughput.link_out),
            ("memory", tiers.on_host as f64 * self.expert / self.memory),
        ];
        here.into_iter().chain(ssd).collect()
    }

    /// The link with the longest of these times: the bottleneck.
    fn slowest(&self, run: &BenchRun) -> (&'static str, f64) {
        let least = self.least_seconds(run);
        least.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("memory is always measured")
    }

    fn describe(&self) -> String {
        let per_second = |rate: f64| format!("{}/s", print::bytes(rate as u64));
        let mut text = format!("limits: memory {}", per_second(self.memory));
        if let Some(OnGpu { throughput, .. }) = self.gpu {
            let [vram, to, from] = [throughput.vram, throughput.link_in, throughput.link_out].map(per_second);
            text += &format!(", VRAM {vram}, to the GPU {to}, from the GPU {from}");
        }
        if let Some(rate) = self.ssd {
            text += &format!(", SSD {} in reads of one expert", per_second(rate));
        }
        text
    }

    fn json(&self) -> Value {
        json!({
            "memory_bytes_per_second": self.memory,
            "ssd_bytes_per_second": self.ssd,
            "bytes_touched_per_token": self.bytes_per_token(),
            "gpu": self.gpu.map(|gpu| json!({
                "vram_bytes_per_second": gpu.throughput.vram,
                "to_gpu_bytes_per_second": gpu.throughput.link_in,
                "from_gpu_bytes_per_second": gpu.throughput.link_out,
                "resident_bytes": gpu.resident_bytes,
            })),
        })
    }
}

/// One run.
struct BenchRun {
    prompt: Totals,
    decode: Totals,
    streaming: bool,
}

/// The first run starts with an empty cache (cold); the others use what it left (warm).
fn measure(engine: &mut InferenceEngine, args: &BenchArgs) -> Result<Vec<BenchRun>> {
    (0..args.repeats).map(|repeat| run_once(engine, args, repeat as u64)).collect()
}

fn run_once(engine: &mut InferenceEngine, args: &BenchArgs, repeat: u64) -> Result<BenchRun> {
    let mut rng = Xoshiro256::new(repeat);
    let vocab = engine.decoder.vocab() as u64;
    let prompt: Vec<u32> = (0..args.prompt).map(|_| (rng.bits() % vocab) as u32).collect();
    let mut sampler = Sampler::new(Sampling::default(), 0)?;

    let mut session = engine.session();
    let mut meter = Meter::new(&session);
    let mut logits = session.forward(&TokenInput::prompt(&prompt), &mut ())?;
    let prompt = meter.lap(&session, args.prompt);
    for _ in 0..args.tokens {
        let id = sampler.sample(&mut logits, session.tokens())?;
        logits = session.forward(&TokenInput::decode(&[id]), &mut ())?;
    }
    let decode = meter.lap(&session, args.tokens);
    Ok(BenchRun { prompt, decode, streaming: session.experts().traffic().is_some() })
}

/// Measures laps: time and traffic since the last one.
struct Meter {
    start: Instant,
    times: PhaseTimes,
    traffic: Traffic,
}

impl Meter {
    fn new(session: &Session<EngineExperts>) -> Self {
        let traffic = session.experts().traffic().unwrap_or_default();
        Meter { start: Instant::now(), times: session.times(), traffic }
    }

    fn lap(&mut self, session: &Session<EngineExperts>, tokens: usize) -> Totals {
        let now = Meter::new(session);
        let then = std::mem::replace(self, now);
        let (time, times) = (self.start - then.start, self.times - then.times);
        Totals { tokens, time, times, traffic: self.traffic - then.traffic }
    }
}

fn rows(runs: &[BenchRun], limits: &Limits) -> Vec<Value> {
    let row = |run: &BenchRun| {
        let least: serde_json::Map<_, _> =
            limits.least_seconds(run).into_iter().map(|(n, s)| (n.into(), json!(s))).collect();
        let (prompt, decode) = (run.prompt.json(run.streaming), run.decode.json(run.streaming));
        json!({"prompt": prompt, "decode": decode, "decode_seconds_at_least": least})
    };
    runs.iter().map(row).collect()
}

fn table(series: &[(&str, Vec<BenchRun>)], limits: &Limits) -> Vec<Vec<String>> {
    let heading = ["", "prefill/s", "decode/s", "min", "max", "hits", "read/token", "of limit"];
    let shares = ["attention", "routing", "experts", "waiting", "other", "in matmul", "in attention", "overhead"];
    let mut rows = vec![heading.into_iter().chain(shares).map(str::to_owned).collect()];
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    for (name, runs) in series.iter().flat_map(|(name, runs)| cold_and_warm(name, runs)) {
        let rates: Vec<f64> = runs.iter().map(|r| r.decode.rate()).collect();
        let median = &runs[median_index(&rates)];
        let Totals { tokens, time, times, traffic } = median.decode;
        let (slowest, least) = limits.slowest(median);
        let of_cache = |text: String| if median.streaming { text } else { "-".into() };
        let share = |part: Duration| percent(part.as_secs_f64() / time.as_secs_f64());
        let other = time.saturating_sub(times.mixing + times.routing + times.experts);
        rows.push(vec![
            name,
            format!("{:.1}", median.prompt.rate()),
            format!("{:.2}", median.decode.rate()),
            format!("{:.2}", rates.iter().copied().fold(f64::INFINITY, f64::min)),
            format!("{:.2}", rates.iter().copied().fold(0.0, f64::max)),
            of_cache(percent(traffic.hit_rate())),
            of_cache(print::bytes(traffic.bytes() / tokens as u64)),
            format!("{} ({slowest})", percent(least / time.as_secs_f64())),
            share(times.mixing),
            share(times.routing),
            share(times.experts.saturating_sub(traffic.waited)),
            of_cache(share(traffic.waited)),
            share(other),
            share(times.products),
            share(times.attention),
            share(time.saturating_sub(times.products + times.attention + traffic.waited)),
        ]);
    }
    rows
}

/// Splits runs with a cache into the first, whose slots were empty, and the others.
fn cold_and_warm<'a>(name: &str, runs: &'a [BenchRun]) -> Vec<(String, &'a [BenchRun])> {
    match runs {
        [first, ..] if !first.streaming => vec![(name.to_owned(), runs)],
        [_] => vec![(format!("{name}, cold"), runs)],
        _ => vec![(format!("{name}, cold"), &runs[..1]), (format!("{name}, warm"), &runs[1..])],
    }
}

/// Index of the median of `values`; the lower one of an even number.
fn median_index(values: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    order[(values.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_runs() {
        assert_eq!(median_index(&[3.0, 1.0, 2.0]), 2);
        assert_eq!(median_index(&[4.0, 1.0, 2.0, 3.0]), 2);
        assert_eq!(median_index(&[1.0]), 0);
    }
}
