//! What λ costs: the passage is decoded with the model's own routing, and with `prior` at some values of λ.

use anyhow::Result;
use larder_engine::MeasuredLambda;
use larder_lab::eval::{ChunkScore, LogitSpread, perplexity_change};
use larder_model::Tap;
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel};
use serde::{Deserialize, Serialize};

use crate::commands::eval::{Measurement, Passage, read_all};
use crate::progress::Bar;

const LAMBDAS: [f64; 6] = [0.05, 0.1, 0.2, 0.4, 0.7, 1.0];

/// Passes over the text.
pub const RUNS: usize = 1 + LAMBDAS.len();

/// The spread of the router logits, by MoE row, and the cost of each λ.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LambdaCosts {
    pub delta: Vec<f32>,
    pub lambdas: Vec<MeasuredLambda>,
}

/// Measures both, each run from an empty cache with this many slots per layer.
pub fn measure(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    passage: &Passage,
    slots: usize,
    bar: &Bar,
) -> Result<LambdaCosts> {
    let run = |engine: &mut InferenceEngine, routing: &RoutingSpec, tap: &mut dyn Tap| -> Result<Measurement> {
        engine.empty_cache(model, slots)?;
        engine.experts.set_routing_strategy(routing, &engine.decoder, model)?;
        read_all(engine, passage, 1, tap, bar)
    };
    let gates: Vec<_> = engine.decoder.gates().cloned().collect();
    let mut spread = LogitSpread::new(&engine.decoder.geometry().clone(), gates.iter().collect());
    let own = run(engine, &RoutingSpec::default(), &mut spread)?;
    let mut lambdas = Vec::new();
    for lambda in LAMBDAS {
        let found = run(engine, &RoutingSpec::standard_prior().with_lambda(&lambda.to_string())?, &mut ())?;
        lambdas.push(measured(lambda, &found, &own.chunks));
    }
    engine.experts.set_routing_strategy(&RoutingSpec::default(), &engine.decoder, model)?;
    Ok(LambdaCosts { delta: spread.delta(), lambdas })
}

fn measured(lambda: f64, found: &Measurement, own: &[ChunkScore]) -> MeasuredLambda {
    let (rise, quality) = (perplexity_change(&found.chunks, own), found.quality.unwrap_or_default());
    let misses = found.traffic.map_or(0, |traffic| traffic.counts.misses);
    MeasuredLambda {
        lambda,
        rise: rise.value,
        rise_error: rise.error,
        agreement: quality.agreement(),
        kl: quality.mean_kl(),
        misses_per_token: misses as f64 / found.tokens.max(1) as f64,
    }
}
