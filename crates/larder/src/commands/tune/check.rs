//! `larder tune --check`: whether budgets hold on a text, with every token computed twice.

use anyhow::Result;
use larder_core::Rng;
use larder_engine::{LossMeter, MEASURE_EVERY, OutputLoss, QualityCalibration, Session, TokenInput};
use larder_model::{LogitsFor, TokenPhase};
use larder_runtime::{InferenceEngine, OpenModel};
use serde_json::{Value, json};

use crate::commands::eval::{Passage, bar};
use crate::print;

/// The budgets that are checked, in nats per token.
const BUDGETS: [f64; 4] = [0.005, 0.01, 0.02, 0.05];
/// Tokens of a block of the bootstrap: losses of tokens near each other are alike.
const BLOCK: usize = 256;
const DRAWS: usize = 2000;
const SEED: u64 = 1;

/// A budget, and what became of it.
struct Checked {
    budget: f64,
    /// Losses of all tokens, and of those that the dial was turned by.
    all: OutputLoss,
    sampled: OutputLoss,
    /// The 95 % interval of the mean loss.
    interval: (f64, f64),
    bytes: f64,
}

/// Decodes the passage with each budget.
pub fn run(
    engine: &mut InferenceEngine,
    model: &OpenModel,
    passage: &Passage,
    (budgets, slots): (&[f64], usize),
    is_json: bool,
) -> Result<()> {
    let budgets = if budgets.is_empty() { &BUDGETS[..] } else { budgets };
    let bar = bar(passage.tokens_read() * budgets.len());
    let mut found = Vec::new();
    for budget in budgets {
        engine.empty_cache(model, slots)?;
        let spec = format!("quality:budget={budget}").parse()?;
        engine.experts.set_routing_strategy(&spec, &engine.decoder, model)?;
        let meter = LossMeter::of_all(MEASURE_EVERY, SEED);
        let mut losses: Vec<f64> = Vec::new();
        for chunk in passage.chunks() {
            engine.experts.new_sequence();
            let session = Session::new(&engine.decoder, &mut engine.experts, chunk.len());
            let mut session = session.with_meter(meter.clone());
            for token in &chunk[..chunk.len() - 1] {
                let before = meter.loss_of_all().unwrap_or_default().kl;
                let (tokens, phase) = (std::slice::from_ref(token), TokenPhase::Decode);
                session.forward(&TokenInput { tokens, phase, chunk: None, logits_for: LogitsFor::Last }, &mut ())?;
                losses.push(meter.loss_of_all().unwrap_or_default().kl - before);
                bar.advance(1);
            }
        }
        let bytes = engine.experts.traffic().map_or(0, |traffic| traffic.bytes()) as f64 / losses.len() as f64;
        let (all, sampled) = (meter.loss_of_all().unwrap_or_default(), meter.loss());
        found.push(Checked { budget: *budget, all, sampled, interval: bootstrap(&losses), bytes });
    }
    bar.finish();
    report(&found, passage, model.quality_calibration()?.as_ref(), is_json);
    Ok(())
}

fn report(found: &[Checked], passage: &Passage, calibration: Option<&QualityCalibration>, is_json: bool) {
    if is_json {
        let rows: Vec<Value> = found.iter().map(Checked::json).collect();
        return println!(
            "{}",
            json!({"text": passage.json(), "calibrated_on": calibration.map(|c| &c.text), "budgets": rows})
        );
    }
    println!("{}, every token computed twice", passage.describe());
    println!(
        "{:>8} {:>9} {:>19} {:>7} {:>19} {:>10} {:>12}",
        "budget", "loss", "95 % interval", "share", "by samples", "same token", "read"
    );
    for one in found {
        let mean = one.all.mean_kl().unwrap_or_default();
        let samples = match (one.sampled.mean_kl(), one.sampled.half_interval()) {
            (Some(mean), Some(half)) => format!("{mean:.5} ± {half:.5}"),
            _ => "-".into(),
        };
        println!(
            "{:>8} {mean:>9.5} {:>19} {:>6.0}% {samples:>19} {:>9.1}% {:>12}",
            one.budget,
            format!("{:.5} to {:.5}", one.interval.0, one.interval.1),
            100.0 * mean / one.budget,
            100.0 * one.all.agreement().unwrap_or_default(),
            print::bytes(one.bytes as u64),
        );
    }
}

impl Checked {
    fn json(&self) -> Value {
        json!({
            "budget": self.budget,
            "tokens": self.all.measured,
            "loss": self.all.mean_kl(),
            "interval": [self.interval.0, self.interval.1],
            "sampled": self.sampled.measured,
            "sampled_loss": self.sampled.mean_kl(),
            "sampled_half_interval": self.sampled.half_interval(),
            "agreement": self.all.agreement(),
            "bytes_per_token": self.bytes,
        })
    }
}

/// The 95 % interval of a mean, by drawing blocks of neighbouring values.
fn bootstrap(losses: &[f64]) -> (f64, f64) {
    let blocks: Vec<(f64, usize)> = losses.chunks(BLOCK).map(|block| (block.iter().sum(), block.len())).collect();
    let mut random = Rng::new(SEED);
    let mut draw = || {
        let drawn = (0..blocks.len()).map(|_| blocks[random.below(blocks.len())]);
        let (sum, count) = drawn.fold((0.0, 0), |(sum, count), block| (sum + block.0, count + block.1));
        sum / count.max(1) as f64
    };
    let mut means: Vec<f64> = (0..DRAWS).map(|_| draw()).collect();
    means.sort_by(f64::total_cmp);
    let at = |share: f64| means[(share * (DRAWS - 1) as f64).round() as usize];
    (at(0.025), at(0.975))
}
