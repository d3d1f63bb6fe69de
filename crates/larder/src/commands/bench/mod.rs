//! `larder bench`: prefill and decode speed, next to the limits of the machine.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use larder_cache::Traffic;
use larder_core::Xoshiro256;
use larder_engine::{
    DraftCounts, PhaseTimes, Sampler, Sampling, Session, SessionDecoding, Speculation, TokenChoice, TokenInput,
};
use larder_os::memory;
use larder_policy::routing::RoutingSpec;
use larder_runtime::{CacheSize, ContextSize, DeviceKind, EngineExperts, EngineSettings, InferenceEngine, Options};
use serde_json::{Value, json};

use self::clients::StepLimits;
use self::kernel_rates::KernelRates;
use self::limits::Limits;
use self::replayed::Replayed;
use crate::cli::BenchArgs;
use crate::models;
use crate::print;
use crate::run_report::RunReport;
use crate::telemetry::Totals;

mod clients;
mod first_token;
mod kernel_rates;
mod limits;
mod llama_rows;
mod replayed;

/// Measures prefill and decode, and how near they come to what memory, SSD and GPU allow.
pub fn run(args: &BenchArgs) -> Result<()> {
    if let Some(format) = args.llama_bench {
        return llama_rows::run(args, format);
    }
    let [depth] = args.depths[..] else { bail!("several depths are for --llama-bench; name one") };
    let settings = settings(args);
    if args.vs_resident && settings.options.device.kind != DeviceKind::Cpu {
        bail!(
            "--vs-resident holds all experts in main memory and does not work with --device; --vram 16x sets how many \
             experts per layer are in VRAM"
        );
    }
    let model = models::open_to_run(&args.model, &settings, &args.ignore_config)?;
    let most = model.blueprint.context;
    let need = depth.saturating_add(args.prompt).saturating_add(args.tokens);
    let first_prompts = first_token::prompts(args, most)?;
    let need = first_prompts.iter().copied().chain([need]).max().unwrap_or(need);
    let context = context_for(&settings, need, most)?;
    let replayed = args.trace.as_deref().map(|path| Replayed::read(path, &model)).transpose()?;
    let mut limits = Limits::measure(&model, &settings.options)?;
    let sequences = args.clients.iter().copied().max().unwrap_or(1);
    let options = Options { sequences, ..models::options(&settings, context)? };
    let options = with_fixed_slots(options);
    let mut engine = InferenceEngine::start(&model, &options)?;
    if let Some(replayed) = &replayed {
        replayed.start(&mut engine)?;
    }
    limits.gpu = engine.gpu;
    let mut series = vec![("as planned", measure(&mut engine, args)?)];
    let first_tokens = first_token::measure(&mut engine, &model, &first_prompts, &limits)?;
    let clients = clients::measure(&mut engine, args)?;
    let measured = !clients.is_empty();
    let kernels = measured.then(|| KernelRates::measure(&model, settings.options.compute.threads)).transpose()?;
    let step_limits = kernels.map(|kernels| StepLimits { links: &limits, kernels });
    if args.vs_resident {
        engine.all_resident(&model)?;
        series.push(("all in memory", measure(&mut engine, args)?));
    }
    if args.json {
        let rows: Vec<Value> =
            series.iter().map(|(name, runs)| json!({"name": name, "runs": rows(runs, &limits)})).collect();
        let first_tokens: Vec<Value> = first_tokens.iter().map(first_token::FirstToken::json).collect();
        let clients: Vec<Value> = step_limits.iter().flat_map(|l| clients.iter().map(|run| run.json(l))).collect();
        println!(
            "{}",
            json!({
                "limits": limits.json(), "plan": engine.plan, "depth": depth, "series": rows,
                "first_tokens": first_tokens, "clients": clients,
            })
        );
        return Ok(());
    }
    println!("{}", limits.describe());
    print!("{}", print::table(&table(&series, &limits)));
    let ngram_rows = series.iter().flat_map(|(_, runs)| runs).filter_map(|run| run.ngram_rows);
    if let Some(all) = ngram_rows.reduce(|all, own| all + own) {
        println!("{}", print::ngram_rows(all));
    }
    if !first_tokens.is_empty() {
        print!("\n{}", print::table(&first_token::table(&first_tokens)));
    }
    if let Some(limits) = &step_limits {
        print!("\n{}", print::table(&clients::table(&clients, limits)));
    }
    Ok(())
}

/// The settings of the flags; tokens are drafted only if that is asked for, and a trace has a routing of its own.
fn settings(args: &BenchArgs) -> EngineSettings {
    let mut settings = args.engine.settings.clone();
    if !settings.is_given("speculate") || args.trace.is_some() {
        settings.options.speculation = Speculation::Off;
    }
    if args.trace.is_some() {
        settings.options.routing = RoutingSpec::default();
    }
    settings
}

/// The context for `need` tokens, with a model whose own context is `most` tokens.
fn context_for(settings: &EngineSettings, need: usize, most: usize) -> Result<ContextSize> {
    if need > most {
        bail!("{need} tokens do not fit into the model's context of {most}; lower --depth, --prompt or --tokens");
    }
    let context = settings.options.context.or_needed(need, most);
    if context.at_most(most) < need {
        bail!("--context {context} has no room for the {need} tokens that are measured; raise it, or leave it out");
    }
    Ok(context)
}

/// What is measured belongs to one number of slots, so that of the start stays.
fn with_fixed_slots(mut options: Options) -> Options {
    if options.cache.size == CacheSize::Auto {
        options.cache.size = CacheSize::Available;
    }
    options
}

/// The first run starts with an empty cache (cold); the others use what it left (warm).
fn measure(engine: &mut InferenceEngine, args: &BenchArgs) -> Result<Vec<RunReport>> {
    (0..args.repeats).map(|repeat| run_once(engine, args, repeat as u64)).collect()
}

fn run_once(engine: &mut InferenceEngine, args: &BenchArgs, repeat: u64) -> Result<RunReport> {
    let mut rng = Xoshiro256::new(repeat);
    let (vocab, ngrams_before) = (engine.decoder.vocab(), engine.decoder.ngram_rows());
    let prompt = random_tokens(args.prompt, vocab, &mut rng);
    let mut sampler = Sampler::new(Sampling::default(), 0)?;

    let drafting = engine.experts.drafting(&engine.drafting());
    let mut session = engine.session();
    let depth = args.depths[0];
    if depth > 0 {
        // Rotary positions that depend on the length of the sequence are those of the whole from the start.
        session.plan_len(depth + args.prompt + args.tokens);
        session.append_made_up(&random_tokens(depth, vocab, &mut rng), repeat)?;
    }
    let mut meter = Meter::new(&session);
    let best = sampler.best(&[session.tokens(), &prompt]);
    let logits = session.forward_best(&TokenInput::prompt(&prompt), best.as_ref(), &mut ())?;
    let prompt = meter.lap(&session, args.prompt);
    let mut decoding = SessionDecoding::new(&mut session, logits, &drafting);
    for more in (0..args.tokens).rev() {
        let id = sampler.sample_row(decoding.logits(), &[])?;
        if !decoding.confirm(id) {
            decoding.settle();
            decoding.next(id, more, &mut sampler, &mut ())?;
        }
    }
    decoding.settle();
    let drafts = decoding.draft_counts();
    drop(decoding);
    let ahead = session.sequence().ahead_counts();
    let decode = meter.lap(&session, args.tokens);
    let streaming = session.experts().traffic().is_some();
    let ngram_rows = engine.decoder.ngram_rows().zip(ngrams_before).map(|(now, before)| now - before);
    let (written, took) = (args.tokens, [prompt.time, decode.time]);
    Ok(RunReport { prompt, decode, written, took, drafts, ahead, ngram_rows, streaming })
}

fn random_tokens(count: usize, vocab: usize, rng: &mut Xoshiro256) -> Vec<u32> {
    (0..count).map(|_| (rng.bits() % vocab as u64) as u32).collect()
}

/// Measures laps: time and traffic since the last one.
struct Meter {
    start: Instant,
    times: PhaseTimes,
    traffic: Traffic,
    page_faults: Option<u64>,
}

impl Meter {
    fn new(session: &Session<EngineExperts>) -> Self {
        let traffic = session.experts().traffic().unwrap_or_default();
        let page_faults = memory::page_faults();
        Meter { start: Instant::now(), times: session.times(), traffic, page_faults }
    }

    fn lap(&mut self, session: &Session<EngineExperts>, tokens: usize) -> Totals {
        let now = Meter::new(session);
        let then = std::mem::replace(self, now);
        let (time, times) = (self.start - then.start, self.times - then.times);
        let page_faults = self.page_faults.zip(then.page_faults).map(|(now, then)| now - then);
        Totals { tokens, time, times, traffic: self.traffic - then.traffic, page_faults }
    }
}

fn rows(runs: &[RunReport], limits: &Limits) -> Vec<Value> {
    let row = |run: &RunReport| {
        let least: serde_json::Map<_, _> =
            limits.least_seconds(run).into_iter().map(|(n, s)| (n.into(), json!(s))).collect();
        let mut json = json!(run);
        json["decode_seconds_at_least"] = least.into();
        json
    };
    runs.iter().map(row).collect()
}

fn table(series: &[(&str, Vec<RunReport>)], limits: &Limits) -> Vec<Vec<String>> {
    let heading = ["", "prefill/s", "decode/s", "min", "max", "hits", "read/token", "of limit"];
    let reads = ["drafts accepted", "SSD in prefill", "in decode"];
    let shares = ["attention", "routing", "experts", "waiting", "other", "in matmul", "in attention", "overhead"];
    let threads = ["one thread", "in prefill", "at joins"];
    let mut rows = vec![heading.into_iter().chain(reads).chain(shares).chain(threads).map(str::to_owned).collect()];
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    for (name, runs) in series.iter().flat_map(|(name, runs)| cold_and_warm(name, runs)) {
        let rates: Vec<f64> = runs.iter().map(|r| r.decode.rate()).collect();
        let median = &runs[median_index(&rates)];
        let Totals { tokens, time, times, traffic, .. } = median.decode;
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
            accepted_drafts(&median.drafts),
            of_cache(read_rate(&median.prompt)),
            of_cache(read_rate(&median.decode)),
            share(times.mixing),
            share(times.routing),
            share(times.experts.saturating_sub(traffic.waited)),
            of_cache(share(traffic.waited)),
            share(other),
            share(times.products),
            share(times.attention),
            share(time.saturating_sub(times.products + times.attention + traffic.waited)),
            percent(median.decode.single_thread_share()),
            percent(median.prompt.single_thread_share()),
            share(times.pool.waited),
        ]);
    }
    rows
}

fn accepted_drafts(drafts: &DraftCounts) -> String {
    if drafts.drafted > 0 { format!("{} of {}", drafts.accepted, drafts.drafted) } else { "-".into() }
}

/// Bytes read per second of a phase, as text.
fn read_rate(phase: &Totals) -> String {
    format!("{}/s", print::bytes(phase.read_rate() as u64))
}

/// Splits runs with a cache into the first, whose slots were empty, and the others.
fn cold_and_warm<'a>(name: &str, runs: &'a [RunReport]) -> Vec<(String, &'a [RunReport])> {
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
