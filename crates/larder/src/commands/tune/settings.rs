//! The settings of the dial: from the model's own routing on, whichever lever saves most bytes for the loss that it
//! adds.

use std::time::Instant;

use anyhow::{Result, bail};
use larder_engine::{LossMeter, MeasuredSetting, Routing, Session};
use larder_lab::eval::score;
use larder_policy::routing::{DialTable, Rung};
use larder_runtime::{InferenceEngine, OpenModel};

use super::checkpoint::TuneCheckpoint;
use crate::commands::eval::Passage;
use crate::progress::Bar;

/// The step of λ.
const LAMBDA_STEP: f64 = 0.04;
/// The step of the price, as a factor.
const PRICE_STEP: f64 = 1.7;
/// The first price leaves out experts of this share of the mean weight, about.
const FIRST_SHARE: f64 = 0.25;
/// Settings are searched up to this loss, in nats per token.
const MOST_LOSS: f64 = 0.08;
/// The most settings.
const MOST: usize = 16;
/// Where losses are small, their ratio to predicted ones is all noise.
const RATIOS: (f64, f64) = (0.2, 5.0);
/// A step that saves less than this share of the bytes is none.
const LEAST_SAVED: f64 = 0.003;

/// The most runs that [`search`] makes.
pub const RUNS: usize = 2 * MOST + 1;

/// Runs of a passage with one setting each.
pub struct Runs<'a> {
    pub engine: &'a mut InferenceEngine,
    pub model: &'a OpenModel,
    pub passage: &'a Passage,
    /// The losses by which misses are weighed.
    pub table: &'a DialTable,
    /// Slots per layer.
    pub slots: usize,
    /// Of how many tokens one is computed twice.
    pub every: u32,
    pub bar: &'a Bar,
    pub checkpoint: &'a mut TuneCheckpoint,
}

/// The settings along the way, beginning with the model's own routing, with rising loss.
pub fn search(runs: &mut Runs, mean_change: f64) -> Result<Vec<MeasuredSetting>> {
    let mut settings = vec![runs.measure(None)?];
    let first_price = mean_change * FIRST_SHARE * FIRST_SHARE;
    while settings.len() < MOST {
        let now = *settings.last().expect("it begins with the model's own routing");
        let price = if now.price > 0.0 { now.price * PRICE_STEP } else { first_price };
        let more = [(now.lambda, price), (now.lambda + LAMBDA_STEP, now.price)];
        let tried = more.map(|(lambda, price)| runs.measure(Some((lambda, price))));
        let mut best: Option<MeasuredSetting> = None;
        for next in tried {
            let next = next?;
            let saved = now.bytes - next.bytes;
            let gain = |other: &MeasuredSetting| (now.bytes - other.bytes) / (other.loss - now.loss).max(1e-6);
            if saved > LEAST_SAVED * settings[0].bytes && best.as_ref().is_none_or(|best| gain(&next) > gain(best)) {
                best = Some(next);
            }
        }
        let Some(best) = best else { break };
        let loss = best.loss.max(now.loss);
        settings.push(MeasuredSetting { loss, ..best });
        if loss > MOST_LOSS {
            break;
        }
    }
    if settings.len() < 2 || settings.last().is_none_or(|last| last.loss <= 0.0) {
        bail!(
            "no setting reads less than the model's own routing on this text; give a longer one, or set --cache lower"
        );
    }
    Ok(settings)
}

impl Runs<'_> {
    /// [`run`](Self::run), unless a tune that was stopped has made it.
    fn measure(&mut self, setting: Option<(f64, f64)>) -> Result<MeasuredSetting> {
        let (lambda, price) = setting.unwrap_or_default();
        if let Some(measured) = self.checkpoint.next_run(lambda, price) {
            return Ok(measured);
        }
        let measured = self.run(setting)?;
        self.checkpoint.keep_run(measured)?;
        Ok(measured)
    }

    /// Decodes the passage from an empty cache with λ and a price, or with the model's own routing.
    fn run(&mut self, setting: Option<(f64, f64)>) -> Result<MeasuredSetting> {
        let Runs { engine, model, passage, table, slots, every, bar, .. } = self;
        engine.empty_cache(model, *slots)?;
        let rows = engine.decoder.geometry().moe_layers.len();
        let (lambda, price) = setting.unwrap_or_default();
        engine.experts.set_routing(match setting {
            Some(_) => Routing::lossy(table.fixed(rows, Rung { lambda, price, loss: 0.0, ratio: 1.0 })),
            None => Routing::default(),
        });
        let meter = LossMeter::new(*every, 1);
        let start = Instant::now();
        for chunk in passage.chunks() {
            engine.experts.new_sequence();
            let session = Session::new(&engine.decoder, &mut engine.experts, chunk.len());
            score(&mut session.with_meter(meter.clone()), chunk, 1, &mut (), &mut |n| bar.advance(n as u64))?;
        }
        let (loss, tokens) = (meter.loss(), passage.tokens_read().max(1) as f64);
        let time = start.elapsed().saturating_sub(loss.time);
        let bytes = engine.experts.traffic().map_or(0, |traffic| traffic.bytes());
        let predicted = engine.experts.routing().and_then(|routing| routing.report()?.predicted_loss);
        let loss = loss.mean_kl().unwrap_or_default();
        Ok(MeasuredSetting {
            lambda,
            price,
            loss,
            ratio: predicted
                .filter(|loss| *loss > 0.0)
                .map_or(1.0, |predicted| (loss / predicted).clamp(RATIOS.0, RATIOS.1)),
            bytes: bytes as f64 / tokens,
            milliseconds: 1e3 * time.as_secs_f64() / tokens,
        })
    }
}
