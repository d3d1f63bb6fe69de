//! Samples of the cost of changes: tokens are decoded with settings drawn at random, each computed twice.

use anyhow::Result;
use larder_core::{LayerIdx, Rng};
use larder_engine::{LossMeter, Session, TokenInput};
use larder_lab::eval::LossSample;
use larder_model::{LogitsFor, Routed, Tap, TokenPhase};
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel};

use crate::commands::eval::Passage;
use crate::progress::Bar;

/// Tokens that are decoded with one setting.
const BLOCK: usize = 48;
/// Tokens of which the weights of experts are measured first.
const WEIGHED: usize = 32;
const SEED: u64 = 29;

/// How often the passage is decoded, each time with other settings: there are two or three factors for each layer, and
/// losses have heavy tails.
pub const PASSES: usize = 4;

/// Decodes a passage, and returns what each token's choices changed, with its loss.
pub fn explore(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    passage: &Passage,
    has_small: bool,
    bar: &Bar,
) -> Result<Vec<LossSample>> {
    let weight = mean_weight(engine, passage)?;
    let mut random = Settings { random: Rng::new(SEED), weight, has_small };
    let meter = LossMeter::new(1, SEED);
    let mut samples = Vec::new();
    for chunk in (0..PASSES).flat_map(|_| passage.chunks()) {
        let mut sequence = engine.session().into_sequence();
        for block in chunk[..chunk.len() - 1].chunks(BLOCK) {
            engine.experts.set_routing_strategy(&random.draw()?, &engine.decoder, model)?;
            let mut session = Session::resume(&engine.decoder, &mut engine.experts, sequence).with_meter(meter.clone());
            for token in block {
                let before = meter.loss();
                decode(&mut session, *token, &mut ())?;
                let measured = meter.loss() - before;
                let changes = session.experts().routing().map(|routing| routing.changes().to_vec());
                if let (1, Some(changes)) = (measured.measured, changes) {
                    samples.push(LossSample { changes, loss: measured.kl });
                }
                bar.advance(1);
            }
            sequence = session.into_sequence();
        }
    }
    Ok(samples)
}

fn decode(session: &mut Session<larder_runtime::EngineExperts>, token: u32, tap: &mut dyn Tap) -> Result<Vec<f32>> {
    let input = TokenInput { tokens: &[token], phase: TokenPhase::Decode, chunk: None, logits_for: LogitsFor::Last };
    Ok(session.forward(&input, tap)?)
}

/// The mean weight of a chosen expert, with the model's own routing.
fn mean_weight(engine: &mut InferenceEngine, passage: &Passage) -> Result<f64> {
    let mut mean = MeanWeight::default();
    let mut session = engine.session();
    for token in passage.chunks().flatten().take(WEIGHED) {
        if session.remaining() == 0 {
            break;
        }
        decode(&mut session, *token, &mut mean)?;
    }
    Ok(mean.sum / mean.count.max(1) as f64)
}

#[derive(Default)]
struct MeanWeight {
    sum: f64,
    count: u64,
}

impl Tap for MeanWeight {
    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, _: LayerIdx, _: &[f32], routed: &Routed) {
        self.sum += routed.weights.iter().map(|weight| f64::from(weight.abs())).sum::<f64>();
        self.count += routed.weights.len() as u64;
    }
}

/// Draws settings.
struct Settings {
    random: Rng,
    /// The mean weight of an expert.
    weight: f64,
    has_small: bool,
}

impl Settings {
    fn unit(&mut self) -> f64 {
        self.random.below(1 << 20) as f64 / f64::from(1 << 20)
    }

    /// A number between two, each of whose magnitudes is as likely.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.unit())
    }

    /// Each lever is off in a third of the blocks.
    fn draw(&mut self) -> Result<RoutingSpec> {
        let lambda = if self.unit() < 0.67 { self.between(0.02, 0.3) } else { 0.0 };
        let light = if self.unit() < 0.67 { self.weight * self.between(0.2, 1.5) } else { 0.0 };
        let mut spec = format!("prior:lambda={lambda}+light:tau={light}");
        if self.has_small {
            let shelf = if self.unit() < 0.67 { self.weight * self.between(0.4, 4.0) } else { 0.0 };
            spec += &format!("+shelf:tau={shelf}");
        }
        Ok(spec.parse()?)
    }
}
