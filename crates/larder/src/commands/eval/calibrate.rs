//! `larder eval calibrate`.

use anyhow::{Result, bail};
use larder_engine::Calibration;
use larder_lab::eval::{LogitSpread, step_tokens, write_calibration};
use larder_runtime::InferenceEngine;
use larder_store::seal_if_in_store;
use serde_json::json;

use super::measure::{bar, read_all};
use super::passage::Passage;
use crate::cli::eval::CalibrateArgs;
use crate::models;

/// Measures the spread of each layer's router logits and writes it into the store, or to --out.
pub fn run(args: &CalibrateArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let path = match (&args.out, model.store()) {
        (Some(path), _) => path.0.clone(),
        (None, Some(_)) => model.source().path().join(Calibration::FILE),
        (None, None) => bail!("{}: is not a store; name the file to write with --out", args.model.display()),
    };
    let passage = Passage::open(&model, &args.text)?;
    let mut engine = InferenceEngine::start(&model, &args.engine.full().options(passage.chunk))?;
    let bar = bar(passage.tokens_read());
    let (delta, tokens) = measure(&mut engine, &passage, &bar)?;
    bar.finish();
    let geometry = &model.blueprint.geometry;
    let model_type = model.blueprint.model_type.clone();
    let made = Calibration { model_type, experts: geometry.experts, text: passage.name.clone(), tokens, delta };
    write_calibration(&made, &path)?;
    seal_if_in_store(&path)?;
    if args.json {
        println!("{}", json!({"file": path, "calibration": made}));
        return Ok(());
    }
    println!("{}: the spread Δ of {} layers over {tokens} tokens of {}", path.display(), made.delta.len(), made.text);
    for (row, delta) in geometry.moe_layers.iter().zip(&made.delta) {
        println!("{row}: {delta:.3}");
    }
    Ok(())
}

fn measure(engine: &mut InferenceEngine, passage: &Passage, bar: &crate::progress::Bar) -> Result<(Vec<f32>, usize)> {
    let piece = step_tokens(engine.decoder.vocab(), engine.prefill_tokens);
    let InferenceEngine { decoder, .. } = engine;
    let gates: Vec<_> = decoder.gates().cloned().collect();
    let mut spread = LogitSpread::new(&decoder.geometry().clone(), gates.iter().collect());
    let tokens = read_all(engine, passage, piece, &mut spread, bar)?.tokens;
    Ok((spread.delta(), tokens))
}
