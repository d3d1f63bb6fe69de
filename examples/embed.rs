//! Embeds larder in a program: opens the demo model, keeps half of its experts in memory, and prints what it generates.
//! `cargo run --release -p larder-runtime --example embed`

use std::error::Error;
use std::io::Write;
use std::path::Path;

use larder_engine::{Listener, Request, Sampler, Sampling, Speculation, generate};
use larder_runtime::{
    CacheOptions, CacheSize, EngineExperts, InferenceEngine, ModelOptions, Notices, OpenModel, Options,
};
use larder_text::StopMatcher;

/// Prints the text as it is generated.
struct Printer;

impl Listener<EngineExperts> for Printer {
    fn text(&mut self, piece: &str) -> bool {
        let mut out = std::io::stdout();
        write!(out, "{piece}").and_then(|()| out.flush()).is_ok() // false ends the generation
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let notices = Notices::to(|notice| eprintln!("{notice}"));
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let model = OpenModel::open(&demo, &ModelOptions { notices, ..Default::default() })?;
    let text = model.text_codec()?;
    let prompt = text.tokenizer.encode("The old man looked at the door, and", true)?;

    let cache = CacheOptions { size: CacheSize::ExpertsPerLayer(16), ..Default::default() };
    let options = Options { context: 256.into(), cache, speculation: Speculation::Auto, ..Default::default() };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let (sampler, stop) = (Sampler::new(Sampling::default(), 0)?, StopMatcher::new(vec![])?);
    let drafting = engine.drafting();
    let eos = &model.generation()?.eos;
    let request = Request { prompt: &prompt, sampler, grammar: None, shown: &[], eos, stop, max_tokens: 40, drafting };
    let generated = generate(&mut engine.session(), &text.tokenizer, request, &mut Printer)?;
    let hits = engine.experts.traffic().map_or(1.0, |traffic| traffic.hit_rate());
    println!("\n[{} tokens, {:.0} % cache hits]", generated.ids.len(), 100.0 * hits);
    Ok(())
}
