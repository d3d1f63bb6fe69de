use anyhow::Result;
use serde_json::json;

use crate::cli::Plan as Args;
use crate::engine::facts;
use crate::gpu::Gpu;
use crate::open::Model;
use crate::plan::{Facts, decide, tiers};
use crate::tiers::both;
use crate::{gpu, print, probe};

/// Says what would stay in memory, and what that allows at most.
pub fn run(args: &Args) -> Result<()> {
    let model = Model::open(&args.model)?;
    let geometry = &model.blueprint.geometry;
    // A GPU comes first, as its driver takes memory for itself.
    let gpu = gpu::open(&args.engine.device)?;
    let facts = facts(&model, &args.engine, args.context)?;
    if let Some(gpu) = gpu {
        return on_gpu(args, &model, facts, &gpu);
    }
    let plan = decide(&facts, &args.engine)?;

    let threads = args.engine.threads();
    let memory_rate = probe::memory_rate(threads);
    let ssd = model.store().map(|store| probe::ssd_rate(store, &args.engine.reader)).transpose()?;
    let per_token = facts.slot * (geometry.top_k * geometry.moe_layers.len()) as u64;
    let touched = (model.touched_resident()? + per_token) as f64;
    let most = memory_rate / touched;
    let least = ssd.as_ref().map(|(rate, _)| most.min(rate / per_token.max(1) as f64));
    if args.json {
        let mut found = plan.json(&facts);
        found["expert_bytes_per_token"] = json!(per_token);
        found["memory_bytes_per_second"] = json!(memory_rate);
        found["ssd_bytes_per_second"] = json!(ssd.as_ref().map(|s| s.0));
        found["tokens_per_second_all_in_memory"] = json!(most);
        found["tokens_per_second_none_in_memory"] = json!(least);
        println!("{found}");
        return Ok(());
    }
    println!("{}", plan.sentences(&facts));
    println!("memory: {}/s with {threads} threads", print::bytes(memory_rate as u64));
    println!("at most {most:.1} tokens/s, if every expert is in memory ({} a token)", print::bytes(touched as u64));
    match (&ssd, least) {
        (Some((rate, how)), Some(least)) => {
            println!("SSD: {}/s at {} a read ({how})", print::bytes(*rate as u64), print::bytes(facts.slot));
            println!("at least {least:.1} tokens/s by the SSD, if none is ({} a token)", print::bytes(per_token));
        }
        _ => println!("SSD: not measured, because only a store is read expert by expert"),
    }
    Ok(())
}

/// The same with a GPU: what would be where. What that allows depends on what is found where; `bench` measures it.
fn on_gpu(args: &Args, model: &Model, facts: Facts, gpu: &Gpu) -> Result<()> {
    let (facts, vram) = both(model, &args.engine, facts, gpu)?;
    let plan = tiers::decide(&facts, &vram, &args.engine)?;
    match args.json {
        true => println!("{}", plan.json(&facts, &vram)),
        false => println!("{}", plan.sentences(&facts, &vram)),
    }
    Ok(())
}
