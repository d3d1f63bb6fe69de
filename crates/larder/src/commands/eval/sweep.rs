//! `larder eval sweep`.

use anyhow::{Result, bail};
use larder_core::Trace;
use larder_engine::{Recorder, Session, text_breaks};
use larder_lab::eval::{
    ChunkScore, RecordingPath, RoutingRun, Tradeoff, TradeoffSetup, Tradeoffs, score, tradeoffs_csv,
};
use larder_lab::report::tradeoffs_page;
use larder_lab::{InitialCache, replay};
use larder_policy::eviction::{EvictionSpec, PolicyInputs, PolicyNeeds};
use larder_policy::routing::RouterReport;
use larder_runtime::{CacheSize, InferenceEngine, OpenModel};
use larder_store::ExpertSource;

use super::grid::{Trial, trials};
use super::measure::{Meter, bar};
use super::passage::Passage;
use super::sensitivity::change_text;
use crate::cli::eval::EvalSweepArgs;
use crate::progress::Bar;
use crate::report_origin::model_origin;
use crate::{models, output, print};

/// Measures perplexity and misses for many strategies and cache sizes.
pub fn run(args: EvalSweepArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    if model.store().is_none() {
        let path = args.model.display();
        bail!("{path}: is not a store, so there is no cache to vary; make one with `larder convert {path} STORE`");
    }
    let geometry = &model.blueprint.geometry;
    let sizes = sizes(&args, geometry.experts)?;
    let trials = trials(&args.grid, geometry)?;
    let passage = Passage::open(&model, &args.text)?;
    let mut options = args.engine.settings.options(passage.chunk);
    options.cache.size = sizes.last().map_or(CacheSize::Available, |most| CacheSize::ExpertsPerLayer(*most));
    let mut engine = InferenceEngine::start(&model, &options)?;
    // Check all strategies against the model now, and not after hours of measuring.
    trials.iter().try_for_each(|trial| engine.experts.set_routing_strategy(&trial.spec, &engine.decoder, &model))?;
    let plan = plan(&args, sizes, &trials);
    let bar = bar(passage.tokens_read() * plan.iter().map(|(_, trials)| trials.len()).sum::<usize>());
    let (mut runs, mut optimum) = (Vec::new(), Vec::new());
    for (slots, trials) in plan {
        for trial in trials {
            engine.empty_cache(&model, slots)?;
            engine.experts.set_routing_strategy(&trial.spec, &engine.decoder, &model)?;
            let (run, trace) = once(&mut engine, &model, &args, trial, slots, &passage, &bar)?;
            if trial.spec.is_lossless() {
                optimum.push((
                    slots,
                    replayed(&args, &engine.policy_inputs, &trace, &"belady".parse()?, slots)?.counts.misses,
                ));
            }
            runs.push(run);
        }
    }
    bar.finish();
    let found = Tradeoffs::new(setup(&args, &model, &passage)?, &runs, &optimum);
    print_report(&args, &found)
}

/// The strategies of each size in the part that is to be measured. Each is compared with the model's own routing, the
/// first, so that is measured too.
fn plan<'t>(args: &EvalSweepArgs, sizes: Vec<usize>, trials: &'t [Trial]) -> Vec<(usize, Vec<&'t Trial>)> {
    let mut pieces = 0..;
    let mut of_size = |slots| {
        let in_part = trials.iter().skip(1).filter(|_| pieces.next().is_some_and(|piece| args.part.has(piece)));
        let others: Vec<&Trial> = in_part.collect();
        let measures = !others.is_empty() || args.part.is_whole();
        (slots, trials.iter().take(usize::from(measures)).chain(others).collect())
    };
    let all = sizes.into_iter().map(&mut of_size);
    all.filter(|(_, trials): &(usize, Vec<&Trial>)| !trials.is_empty()).collect()
}

fn sizes(args: &EvalSweepArgs, experts: usize) -> Result<Vec<usize>> {
    let mut sizes =
        if args.sizes.is_empty() { vec![(experts / 4).max(1), (experts / 2).max(1)] } else { args.sizes.clone() };
    sizes.sort_unstable();
    sizes.dedup();
    match sizes.last() {
        Some(most) if *most > experts => {
            bail!("--sizes {most} is more than the {experts} experts of a layer; use at most {experts}")
        }
        _ => Ok(sizes),
    }
}

fn setup(args: &EvalSweepArgs, model: &OpenModel, passage: &Passage) -> Result<TradeoffSetup> {
    let geometry = &model.blueprint.geometry;
    let threads = args.engine.settings.options.compute.threads;
    Ok(TradeoffSetup {
        model: args.model.file_name().unwrap_or(args.model.as_os_str()).to_string_lossy().into_owned(),
        text: passage.name.clone(),
        tokens: passage.tokens_read() as u64,
        chunk: passage.chunk,
        layers: geometry.moe_layers.len(),
        experts: geometry.experts,
        top_k: geometry.top_k,
        eviction: args.engine.settings.options.cache.eviction.to_string(),
        scope: args.engine.settings.options.cache.scope.to_string(),
        max_loss: args.max_loss,
        made: model_origin(threads, model, &args.model)?,
    })
}

/// Processes the passage one token per step, starting with an empty cache, and records a trace.
fn once(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    args: &EvalSweepArgs,
    trial: &Trial,
    slots: usize,
    passage: &Passage,
    bar: &Bar,
) -> Result<(RoutingRun, Trace)> {
    let with_logits = args.engine.settings.options.cache.eviction.needs() == PolicyNeeds::Evictor;
    let mut recorder = Recorder::of_decoder(&engine.decoder, with_logits)?;
    let meter = Meter::new(engine);
    let loss_meter = engine.loss_meter().clone();
    loss_meter.redraw();
    let mut chunks: Vec<ChunkScore> = Vec::new();
    for chunk in passage.chunks() {
        recorder.new_sequence();
        engine.experts.new_sequence();
        let mut experts = RecordingPath::new(&mut engine.experts, &mut recorder);
        let session = Session::new(&engine.decoder, &mut experts, chunk.len());
        let mut session = session.with_meter(loss_meter.clone());
        chunks.push(score(&mut session, chunk, 1, &mut (), &mut |n| bar.advance(n as u64))?);
    }
    let found = meter.finish(engine, passage.tokens_read(), chunks);
    let trace = recorder.into_trace()?;
    let traffic = found.traffic.unwrap_or_default();
    let misses = traffic.counts.misses as f64 + traffic.small_reads as f64 * small_share(model);
    // A trace does not tell smaller copies from experts that took slots.
    let lifetime = match traffic.small_reads {
        0 => Some(
            replayed(args, &engine.policy_inputs, &trace, &args.engine.settings.options.cache.eviction, slots)?
                .lifetimes
                .mean(),
        ),
        _ => None,
    };
    let report = engine.experts.routing().and_then(|routing| routing.report());
    let run = RoutingRun {
        routing: trial.spec.to_string(),
        family: trial.family.clone(),
        slots,
        misses,
        bytes: traffic.bytes(),
        lifetime,
        tokens_per_second: found.rate(),
        quality: found.quality.unwrap_or_default(),
        loss: found.loss,
        lambda: report.and_then(|report| mean_lambda(&report)),
        chunks: found.chunks,
    };
    Ok((run, trace))
}

/// The size of a smaller copy, as a share of an expert.
pub fn small_share(model: &OpenModel) -> f64 {
    let Some((store, small)) = model.store().and_then(|store| Some((store, store.small_shards()?))) else { return 0.0 };
    let layers = &model.blueprint.geometry.moe_layers;
    let bytes = |all: &dyn ExpertSource| layers.iter().map(|layer| all.layout(*layer).bytes).sum::<usize>() as f64;
    bytes(small) / bytes(store.as_ref())
}

fn mean_lambda(report: &RouterReport) -> Option<f64> {
    let count = report.lambda.len();
    (count > 0).then(|| report.lambda.iter().sum::<f64>() / count as f64)
}

/// Replays the trace through the cache with an eviction policy.
fn replayed(
    args: &EvalSweepArgs,
    inputs: &PolicyInputs,
    trace: &Trace,
    spec: &EvictionSpec,
    slots: usize,
) -> Result<larder_lab::ReplayResult> {
    let cache = &args.engine.settings.options.cache;
    let axes = (slots, cache.scope, cache.scratch);
    Ok(replay(trace, axes, spec, inputs, InitialCache::Carried)?)
}

fn print_report(args: &EvalSweepArgs, found: &Tradeoffs) -> Result<()> {
    if let Some(path) = &args.csv {
        tradeoffs_csv(found, path)?;
    }
    if let Some(path) = &args.html {
        output::write(path, tradeoffs_page(found))?;
    }
    if args.json {
        println!("{}", found.to_json());
        return Ok(());
    }
    let setup = &found.setup;
    println!("{}: {} tokens in chunks of {}, one token per step", setup.text, setup.tokens, setup.chunk);
    for slots in found.sizes() {
        println!("\n{slots} of {} experts per layer in memory, eviction {}", setup.experts, setup.eviction);
        print!("{}", print::table(&table(found, slots)));
        println!("{}", prices(found, slots));
    }
    warn(found);
    Ok(())
}

fn table(found: &Tradeoffs, slots: usize) -> Vec<Vec<String>> {
    let heads = [
        "routing",
        "perplexity",
        "change",
        "output KL",
        "misses",
        "per token",
        "read",
        "lifetime",
        "tokens/s",
        "kept",
        "KL",
        "λ",
        "",
    ];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for row in found.rows.iter().filter(|row| row.slots == slots) {
        let some = |n: Option<f64>, digits: usize| n.map_or_else(|| "-".to_owned(), |n| format!("{n:.digits$}"));
        rows.push(vec![
            row.routing.clone(),
            format!("{:.4}", row.perplexity.value),
            change_text(&row.loss),
            some(row.output_kl, 4),
            format!("{:.2} %", 100.0 * row.miss_rate),
            format!("{:.2}", row.misses_per_token),
            print::bytes(row.bytes_per_token as u64),
            some(row.lifetime, 1),
            format!("{:.1}", row.tokens_per_second),
            format!("{:.1} %", 100.0 * row.kept_mass),
            format!("{:.4}", row.kl),
            some(row.lambda, 3),
            verdict(row).to_owned(),
        ]);
    }
    rows
}

fn verdict(row: &Tradeoff) -> &'static str {
    match (text_breaks(row.loss.value), row.beyond, row.pareto) {
        (true, _, true) => "front, text breaks",
        (true, _, false) => "text breaks",
        (false, true, true) => "front, too lossy",
        (false, true, false) => "too lossy",
        (false, false, true) => "front",
        (false, false, false) => "",
    }
}

/// The lowest miss rate for each loss of perplexity, next to the best possible eviction.
fn prices(found: &Tradeoffs, slots: usize) -> String {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), percent);
    let own = rate(found.original(slots).map(|row| row.miss_rate));
    let optimum = rate(found.optimum.iter().find(|(at, _)| *at == slots).map(|(_, rate)| *rate));
    let mut out = format!("misses: {own} with {}, {optimum} with Belady (best possible)", found.setup.eviction);
    for within in found.best_within(slots) {
        if let Some(row) = within.best {
            out += &format!(
                "; {} at up to {} higher perplexity ({})",
                percent(row.miss_rate),
                print::percent(within.share),
                row.routing
            );
        }
    }
    out
}

/// Warns of strategies that lose too much quality.
fn warn(found: &Tradeoffs) {
    let beyond: Vec<&Tradeoff> = found.rows.iter().filter(|row| row.beyond).collect();
    if beyond.is_empty() {
        return;
    }
    let share = print::percent(found.setup.max_loss);
    println!(
        "\ntoo lossy: {} of {} strategies raise perplexity by more than {share}. Their text still reads fluently, but loses \
         its sense before its grammar. Choose λ by measurement, not by reading samples.",
        beyond.len(),
        found.rows.len()
    );
}
