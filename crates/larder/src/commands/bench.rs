use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_engine::{CHUNK, Rng, Sampler, Sampling, Session};
use larder_model::{Decoder, Rows};
use larder_store::Store;
use serde_json::{Value, json};

use crate::cli::Bench;
use crate::experts::{self, Experts, slot_bytes};
use crate::open::Model;
use crate::{print, probe};

/// Measures reading a prompt and writing on, and how near that comes to what the machine allows.
pub fn run(args: &Bench) -> Result<()> {
    let model = Model::open(&args.model)?;
    let need = args.prompt.saturating_add(args.tokens);
    if need > model.blueprint.context {
        bail!("{need} tokens do not fit the model's context of {}", model.blueprint.context);
    }
    let limits = Limits::measure(&model, &args.cache.reader)?;
    let decoder = model.decoder()?;
    let mut series = vec![("as planned", measure(&decoder, &mut experts::open(&model, &args.cache)?, args)?)];
    if args.vs_resident {
        let mut all = Experts::AllResident(model.all_resident()?);
        series.push(("all in memory", measure(&decoder, &mut all, args)?));
    }
    if args.json {
        let rows: Vec<Value> =
            series.iter().map(|(name, runs)| json!({"name": name, "runs": rows(runs, args)})).collect();
        println!("{}", json!({"limits": limits.json(), "series": rows}));
        return Ok(());
    }
    println!("{}", limits.sentence());
    print!("{}", print::table(&table(&series, args, &limits)));
    Ok(())
}

/// What the machine gives, measured in this run.
struct Limits {
    memory: f64,
    ssd: Option<f64>,
    /// Bytes that every token reads from memory.
    touched: f64,
}

impl Limits {
    fn measure(model: &Model, reader: &str) -> Result<Self> {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let ssd = |store: &Arc<Store>| probe::ssd_rate(store, reader).map(|(rate, _)| rate);
        let geometry = &model.blueprint.geometry;
        let per_token = slot_bytes(model)? * (geometry.top_k * geometry.moe_layers.len()) as u64;
        Ok(Limits {
            memory: probe::memory_rate(threads),
            ssd: model.store().map(ssd).transpose()?,
            touched: (model.touched_resident()? + per_token) as f64,
        })
    }

    /// The least time that writing could have taken: the slower of memory and SSD.
    fn least(&self, run: &Run, tokens: usize) -> f64 {
        let memory = tokens as f64 * self.touched / self.memory;
        let ssd = self.ssd.map_or(0.0, |rate| run.traffic.map_or(0, |t| t.bytes) as f64 / rate);
        memory.max(ssd)
    }

    fn sentence(&self) -> String {
        let memory = print::bytes(self.memory as u64);
        match self.ssd {
            Some(rate) => format!("memory {memory}/s, SSD {}/s at the size of an expert", print::bytes(rate as u64)),
            None => format!("memory {memory}/s"),
        }
    }

    fn json(&self) -> Value {
        json!({
            "memory_bytes_per_second": self.memory,
            "ssd_bytes_per_second": self.ssd,
            "bytes_touched_per_token": self.touched,
        })
    }
}

/// One repeat.
struct Run {
    prompt: Duration,
    decode: Duration,
    /// While writing.
    traffic: Option<Traffic>,
}

/// The first run begins with an empty cache and is cold; the others are warm. Reads go past the page cache.
fn measure(decoder: &Decoder, experts: &mut Experts, args: &Bench) -> Result<Vec<Run>> {
    (0..args.repeats).map(|repeat| once(decoder, experts, args, repeat as u64)).collect()
}

fn once(decoder: &Decoder, experts: &mut Experts, args: &Bench, repeat: u64) -> Result<Run> {
    let mut rng = Rng::new(repeat);
    let prompt: Vec<u32> = (0..args.prompt).map(|_| (rng.bits() % decoder.vocab() as u64) as u32).collect();
    let mut sampler = Sampler::new(Sampling::default(), 0)?;

    let start = Instant::now();
    let mut session = Session::new(decoder, experts);
    let mut logits = session.read(&prompt, CHUNK, Rows::Last, &mut ())?;
    let prompt = start.elapsed();

    let (before, start) = (session.experts().traffic(), Instant::now());
    for _ in 0..args.tokens {
        let id = sampler.sample(&mut logits, session.tokens())?;
        logits = session.read(&[id], 1, Rows::Last, &mut ())?;
    }
    let decode = start.elapsed();
    let after = session.experts().traffic();
    Ok(Run { prompt, decode, traffic: after.zip(before).map(|(after, before)| after - before) })
}

fn rows(runs: &[Run], args: &Bench) -> Vec<Value> {
    let row = |run: &Run| {
        json!({
            "prompt_tokens": args.prompt,
            "prompt_seconds": run.prompt.as_secs_f64(),
            "decode_tokens": args.tokens,
            "decode_seconds": run.decode.as_secs_f64(),
            "hits": run.traffic.map(|t| t.counts.hits),
            "misses": run.traffic.map(|t| t.counts.misses),
            "bytes_read": run.traffic.map(|t| t.bytes),
            "seconds_waiting": run.traffic.map(|t| t.waited.as_secs_f64()),
            "seconds_computing": run.traffic.map(|t| t.computed.as_secs_f64()),
        })
    };
    runs.iter().map(row).collect()
}

fn table(series: &[(&str, Vec<Run>)], args: &Bench, limits: &Limits) -> Vec<Vec<String>> {
    let heading = ["", "prompt/s", "written/s", "least", "most", "found", "read/token", "waiting", "of the limit"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for (name, runs) in series {
        let rates: Vec<f64> = runs.iter().map(|r| args.tokens as f64 / r.decode.as_secs_f64()).collect();
        let middle = &runs[median_index(&rates)];
        let rate = args.tokens as f64 / middle.decode.as_secs_f64();
        let traffic = |f: fn(Traffic, f64) -> String| middle.traffic.map_or("-".into(), |t| f(t, args.tokens as f64));
        rows.push(vec![
            (*name).to_owned(),
            format!("{:.1}", args.prompt as f64 / middle.prompt.as_secs_f64()),
            format!("{rate:.2}"),
            format!("{:.2}", rates.iter().copied().fold(f64::INFINITY, f64::min)),
            format!("{:.2}", rates.iter().copied().fold(0.0, f64::max)),
            traffic(|t, _| {
                let wanted = (t.counts.hits + t.counts.misses).max(1);
                format!("{:.0} %", 100.0 * t.counts.hits as f64 / wanted as f64)
            }),
            traffic(|t, tokens| print::bytes((t.bytes as f64 / tokens) as u64)),
            match middle.traffic {
                Some(t) => format!("{:.0} %", 100.0 * t.waited.as_secs_f64() / middle.decode.as_secs_f64()),
                None => "-".into(),
            },
            format!("{:.0} %", 100.0 * limits.least(middle, args.tokens) / middle.decode.as_secs_f64()),
        ]);
    }
    rows
}

/// Where the median of `values` stands; of an even number the lower one.
fn median_index(values: &[f64]) -> usize {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    order[(values.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_a_run_that_happened() {
        assert_eq!(median_index(&[3.0, 1.0, 2.0]), 2);
        assert_eq!(median_index(&[4.0, 1.0, 2.0, 3.0]), 2);
        assert_eq!(median_index(&[1.0]), 0);
    }
}
