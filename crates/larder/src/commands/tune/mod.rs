//! `larder tune`.

mod check;
mod checkpoint;
mod explore;
mod lambda_costs;
mod settings;

use std::hash::{Hash, Hasher};
use std::time::SystemTime;

use anyhow::{Result, bail};
use larder_core::{DEFINITION, printable, rfc3339};
use larder_engine::{MeasuredSetting, QualityCalibration};
use larder_lab::eval::{LossSample, fit_losses, fit_quality};
use larder_lab::report::{QualityReport, quality_page};
use larder_model::ExpertPath;
use larder_policy::routing::{DialTable, QUALITY_BUDGETS, RoutingSpec, TARGET};
use larder_runtime::{InferenceEngine, OpenModel};
use larder_store::seal_if_in_store;
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use self::checkpoint::TuneCheckpoint;
use self::lambda_costs::LambdaCosts;
use self::settings::{RUNS, Runs};
use super::eval::{Passage, bar, small_share};
use crate::cli::eval::TextFlags;
use crate::cli::tune::TuneArgs;
use crate::report_origin::model_origin;
use crate::{models, output, print};

/// Tokens of the text unless something else is asked for: each is decoded some forty times.
const TOKENS: usize = 2048;
/// Of how many tokens one is computed twice while settings are measured.
const MEASURE_EVERY: u32 = 2;

/// Makes the calibration of a store for lossy routing, or checks it.
pub fn run(args: &TuneArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let Some(store) = model.store() else {
        let path = args.model.display();
        bail!("{path}: is not a store, so no experts are missing; make one with `larder convert {path} STORE`");
    };
    let path = model.source().path().join(QualityCalibration::FILE);
    if !args.check {
        output::check(&path, args.replace.force)?;
    }
    let tokens = args.text.tokens.or((!args.check).then_some(TOKENS));
    let passage = Passage::open(&model, &TextFlags { tokens, ..args.text.clone() })?;
    let options = args.engine.settings.options(passage.chunk);
    let mut engine = InferenceEngine::start(&model, &options)?;
    let slots = slots_of(&engine)?;
    if args.check {
        return check::run(&mut engine, &model, &passage, (&args.budgets, slots), args.json);
    }
    check_measurable(&mut engine, &model)?;
    let small_share = store.small_shards().map(|_| small_share(&model));
    let eviction = options.cache.eviction.to_string();
    let cache = format!("{slots} slots, {:?}, {eviction}, {:?}", options.cache.scope, options.cache.evictor);
    let rows = engine.decoder.geometry().moe_layers.len();
    let mut checkpoint = TuneCheckpoint::open(&path, conditions(&model, &passage, &cache)?, rows);
    let (made, fit) = calibrate(&mut engine, &model, &passage, (slots, small_share), &mut checkpoint)?;
    let made = QualityCalibration { eviction, ..made };
    output::write(&path, serde_json::to_vec_pretty(&made)?)?;
    seal_if_in_store(&path)?;
    checkpoint.remove();
    if let Some(to) = &args.html {
        let origin = model_origin(options.compute.threads, &model, &args.model)?;
        let expected = QUALITY_BUDGETS.map(|(name, budget)| (name, budget, made.at_loss(TARGET * budget)));
        output::write(to, quality_page(&QualityReport { made: &made, expected: &expected, fit, origin: &origin }))?;
    }
    print_result(&made, fit, &path.display().to_string(), args.json);
    Ok(())
}

/// What all passes of a calibration depend on.
fn conditions(model: &OpenModel, passage: &Passage, cache: &str) -> Result<String> {
    let mut text = XxHash3_64::new();
    passage.chunks().for_each(|chunk| chunk.hash(&mut text));
    let of = json!({
        "larder": env!("CARGO_PKG_VERSION"),
        "definition": DEFINITION,
        "model": model.identity()?,
        "text": text.finish(),
        "cache": cache,
        "small": model.store().is_some_and(|store| store.small_shards().is_some()),
    });
    Ok(of.to_string())
}

/// Measures what λ costs, fits the losses and searches the settings. Returns the calibration, without the eviction
/// policy, and how well losses are predicted.
fn calibrate(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    passage: &Passage,
    (slots, small_share): (usize, Option<f64>),
    checkpoint: &mut TuneCheckpoint,
) -> Result<(QualityCalibration, (f64, f64))> {
    let bar = bar(passage.tokens_read() * (lambda_costs::RUNS + explore::PASSES + RUNS));
    if checkpoint.passes() > 0 {
        eprintln!("going on after {} of a tune that was stopped", print::count(checkpoint.passes(), "pass", "passes"));
        bar.advance((checkpoint.passes() * passage.tokens_read()) as u64);
    }
    let LambdaCosts { delta, lambdas } = match checkpoint.lambda_costs() {
        Some(costs) => costs,
        None => checkpoint.keep_lambda_costs(lambda_costs::measure(engine, model, passage, slots, &bar)?)?,
    };
    let samples = match checkpoint.samples() {
        Some(samples) => samples,
        None => {
            engine.empty_cache(model, slots)?;
            let samples = explore::explore(engine, model, passage, small_share.is_some(), &bar)?;
            checkpoint.keep_samples(&samples)?;
            samples
        }
    };
    let geometry = model.blueprint.geometry.clone();
    let Some(mut table) = fit_losses(&samples, geometry.moe_layers.len()) else {
        bail!("no token changed by leaving experts out; give a longer text, or set --cache lower");
    };
    table.small_share = small_share.unwrap_or_default();
    let (mean_change, fit) = (mean_change(&samples, &table), fit_quality(&samples, &table));
    let mut runs = Runs { engine, model, passage, table: &table, slots, every: MEASURE_EVERY, bar: &bar, checkpoint };
    let settings = settings::search(&mut runs, mean_change)?;
    bar.finish();
    let made = QualityCalibration {
        model_type: model.blueprint.model_type.clone(),
        experts: geometry.experts,
        text: printable(&passage.name),
        tokens: passage.tokens_read(),
        date: rfc3339(SystemTime::now())[.."2026-11-26".len()].to_owned(),
        larder: env!("CARGO_PKG_VERSION").to_owned(),
        definition: DEFINITION,
        slots,
        eviction: String::new(),
        delta,
        lambdas,
        substituted: table.substituted,
        left_out: table.left_out,
        small: table.small,
        small_share: table.small_share,
        settings,
    };
    Ok((made, fit))
}

/// Fails where no token can be computed twice.
fn check_measurable(engine: &mut InferenceEngine, model: &OpenModel) -> Result<()> {
    engine.experts.set_routing_strategy(&RoutingSpec::standard_prior(), &engine.decoder, model)?;
    let is_measurable = engine.experts.exact().is_some();
    engine.experts.set_routing_strategy(&RoutingSpec::default(), &engine.decoder, model)?;
    if is_measurable {
        Ok(())
    } else {
        bail!("the loss of outputs cannot be measured with a GPU or edge workers; tune without them")
    }
}

/// Slots per layer; fails where all experts fit.
fn slots_of(engine: &InferenceEngine) -> Result<usize> {
    let experts = engine.decoder.geometry().experts;
    match engine.experts.slots_per_layer() {
        Some(slots) if slots < experts => Ok(slots),
        _ => bail!("all experts fit into memory, so none is missing; set --cache lower than {experts}x"),
    }
}

/// The loss of leaving an expert of the mean weight out.
fn mean_change(samples: &[LossSample], table: &DialTable) -> f64 {
    let mean_factor = table.left_out.iter().sum::<f64>() / table.left_out.len() as f64;
    let squares = samples.iter().flat_map(|sample| &sample.changes).map(|change| change.left_out).filter(|x| *x > 0.0);
    let (sum, count) = squares.fold((0.0, 0u64), |(sum, count), x| (sum + x, count + 1));
    mean_factor * sum / count.max(1) as f64
}

fn print_result(made: &QualityCalibration, fit: (f64, f64), path: &str, is_json: bool) {
    let expected = |budget: f64| made.at_loss(TARGET * budget);
    if is_json {
        let budgets: Vec<Value> = QUALITY_BUDGETS
            .iter()
            .map(|(name, budget)| json!({"name": name, "budget": budget, "expected": expected(*budget)}))
            .collect();
        println!("{}", json!({"file": path, "calibration": made, "budgets": budgets, "correlation": fit.1}));
        return;
    }
    let settings = print::count(made.settings.len() - 1, "setting", "settings");
    println!("{path}: {settings}, from {} tokens of {}", made.tokens, made.text);
    println!("predicted and true losses of tokens correlate by {:.2}", fit.1);
    let line = |name: &str, setting: &MeasuredSetting| {
        println!(
            "{name:<26} {:>7.1} tokens/s, {:>9} read per token, loss {:.4}",
            1e3 / setting.milliseconds,
            print::bytes(setting.bytes as u64),
            setting.loss
        );
    };
    line("--quality off", &made.settings[0]);
    for (name, budget) in QUALITY_BUDGETS {
        line(&format!("--quality {name} ({budget})"), &expected(budget));
    }
}
