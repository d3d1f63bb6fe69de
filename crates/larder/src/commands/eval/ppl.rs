//! `larder eval ppl`.

use std::f64::consts::LN_2;

use anyhow::Result;
use larder_lab::eval::{ChunkEstimate, perplexity, step_tokens};
use larder_runtime::InferenceEngine;
use serde_json::json;

use super::measure::{Measurement, bar, read_all, step_text, tokens_per_step, warn_if_all_fit};
use super::passage::Passage;
use crate::cli::eval::PplArgs;
use crate::models;

/// Measures the perplexity of a text.
pub fn run(args: &PplArgs) -> Result<()> {
    let settings = args.record.set(args.engine.settings.clone());
    let model = models::open(&args.model)?;
    let passage = Passage::open(&model, &args.text)?;
    let mut engine = InferenceEngine::start(&model, &settings.options(passage.chunk))?;
    let most = step_tokens(model.blueprint.vocab, engine.prefill_tokens);
    let piece = tokens_per_step(&args.step, &settings.options, most);
    warn_if_all_fit(&engine, &settings.options);
    let bar = bar(passage.tokens_read());
    let found = read_all(&mut engine, &passage, piece, &mut (), &bar)?;
    bar.finish();
    engine.experts.write_trace("larder eval ppl")?;
    let ppl = perplexity(&found.chunks);
    let bits = passage.bytes().map(|bytes| bits_per_byte(&found, bytes));
    if args.json {
        let mut all = found.json(engine.experts.routing());
        all["text"] = passage.json();
        all["tokens_at_once"] = piece.into();
        all["perplexity"] = ppl.value.into();
        all["standard_error"] = ppl.error.into();
        all["nats"] = nats(&found).into();
        all["tokens_scored"] = found.tokens.into();
        all["bits_per_byte"] = bits.into();
        all["chunks"] = json!(found.chunks);
        all["plan"] = engine.plan;
        println!("{all}");
        return Ok(());
    }
    println!("{}, {}", passage.describe(), step_text(piece));
    let bits = bits.map(|bits| format!(", {bits:.4} bits per byte")).unwrap_or_default();
    println!("perplexity: {}{bits}, over {} tokens", shown(&ppl), found.tokens);
    print!("{}", found.lines(&settings.options.routing.to_string()));
    Ok(())
}

/// A perplexity with its standard error.
pub fn shown(ppl: &ChunkEstimate) -> String {
    match ppl.error {
        Some(error) => format!("{:.4} ± {error:.4}", ppl.value),
        None => format!("{:.4}", ppl.value),
    }
}

fn nats(found: &Measurement) -> f64 {
    found.chunks.iter().map(|c| c.nats).sum()
}

fn bits_per_byte(found: &Measurement, bytes: usize) -> f64 {
    nats(found) / LN_2 / bytes.max(1) as f64
}
