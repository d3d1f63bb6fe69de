//! `larder eval sweep --save`: the measured costs of λ, written into the store.

use std::time::SystemTime;

use anyhow::{Result, anyhow, bail};
use larder_core::{printable, rfc3339};
use larder_engine::{LambdaCosts, MeasuredLambda, SizeCosts, text_breaks};
use larder_lab::eval::{Tradeoff, TradeoffSetup, Tradeoffs};
use larder_runtime::OpenModel;
use larder_store::seal_if_in_store;

use super::grid::Trial;
use crate::{output, print};

/// Refuses before a sweep what could not be saved after it.
pub fn check(model: &OpenModel, trials: &[Trial], force: bool) -> Result<()> {
    settings(trials)?;
    output::check(&model.source().path().join(LambdaCosts::FILE), force)
}

/// Writes the costs of all λ of a sweep into the store.
pub fn save(model: &OpenModel, trials: &[Trial], found: &Tradeoffs, is_quiet: bool) -> Result<()> {
    let sizes: Vec<SizeCosts> =
        found.sizes().into_iter().map(|slots| size_costs(trials, found, slots)).collect::<Result<_>>()?;
    let TradeoffSetup { text, tokens, chunk, eviction, scope, .. } = found.setup.clone();
    let costs = LambdaCosts {
        text: printable(&text),
        tokens,
        chunk,
        date: rfc3339(SystemTime::now())[.."2026-11-26".len()].to_owned(),
        larder: env!("CARGO_PKG_VERSION").to_owned(),
        eviction,
        scope,
        settings: settings(trials)?,
        sizes,
        ..LambdaCosts::new(&model.blueprint.model_type, &model.blueprint.geometry)
    };
    costs.check().map_err(|why| anyhow!("the costs of λ cannot be saved: {why}"))?;
    let path = model.source().path().join(LambdaCosts::FILE);
    output::write(&path, serde_json::to_vec_pretty(&costs)?)?;
    seal_if_in_store(&path)?;
    if !is_quiet {
        let lambdas = print::count(costs.sizes[0].lambdas.len(), "value", "values");
        println!("{}: the cost of {lambdas} of λ", path.display());
    }
    Ok(())
}

/// The options of `prior` beside λ, which are those of all trials with a λ.
fn settings(trials: &[Trial]) -> Result<String> {
    let mut all: Vec<String> =
        trials.iter().filter(|trial| has_lambda(trial)).filter_map(|trial| trial.spec.prior_settings()).collect();
    all.dedup();
    match all.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!("--save needs a strategy with a fixed λ; give values with --lambda"),
        _ => bail!("--save needs one kind of Δ; give one with --delta"),
    }
}

fn has_lambda(trial: &Trial) -> bool {
    trial.spec.lambda().is_some_and(|lambda| lambda > 0.0)
}

fn size_costs(trials: &[Trial], found: &Tradeoffs, slots: usize) -> Result<SizeCosts> {
    let row = |trial: &Trial| {
        let routing = trial.spec.to_string();
        found.rows.iter().find(|row| row.slots == slots && row.routing == routing)
    };
    let mut lambdas: Vec<MeasuredLambda> = trials
        .iter()
        .filter(|trial| has_lambda(trial))
        .filter_map(|trial| Some(measured(trial.spec.lambda()?, row(trial)?)))
        .collect();
    lambdas.sort_by(|a, b| a.lambda.total_cmp(&b.lambda));
    lambdas.dedup_by_key(|measured| measured.lambda.to_bits());
    let own = found.original(slots).ok_or_else(|| anyhow!("the model's own routing was not measured"))?;
    Ok(SizeCosts { slots, perplexity: own.perplexity.value, lambdas })
}

fn measured(lambda: f64, row: &Tradeoff) -> MeasuredLambda {
    MeasuredLambda {
        lambda,
        rise: row.loss.value,
        rise_error: row.loss.error,
        agreement: 1.0 - row.substituted,
        substituted: row.substituted,
        kl: row.kl,
        misses_per_token: row.misses_per_token,
        text_breaks: text_breaks(row.loss.value),
    }
}
