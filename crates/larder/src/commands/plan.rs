use anyhow::Result;
use serde_json::json;

use crate::cli::PlanArgs;
use crate::engine::plan_inputs;
use crate::gpu::GpuParts;
use crate::open::OpenModel;
use crate::plan::{PlanInputs, decide, tiers};
use crate::tiers::tier_inputs;
use crate::{gpu, print, probe};

/// Says what would stay in memory, and what that allows at most.
pub fn run(args: &PlanArgs) -> Result<()> {
    let model = OpenModel::open(&args.model)?;
    let geometry = &model.blueprint.geometry;
    // A GPU comes first, as its driver takes memory for itself.
    let gpu = gpu::open(&args.engine.device)?;
    let inputs = plan_inputs(&model, &args.engine, args.context)?;
    if let Some(gpu) = gpu {
        return on_gpu(args, &model, inputs, &gpu);
    }
    let plan = decide(&inputs, &args.engine)?;

    let threads = args.engine.threads();
    let memory_bandwidth = probe::memory_bandwidth(threads);
    let ssd = model.store().map(|store| probe::ssd_throughput(store, &args.engine.reader)).transpose()?;
    let per_token = inputs.slot_bytes * (geometry.top_k * geometry.moe_layers.len()) as u64;
    let bytes_per_token = (model.resident_bytes_per_token()? + per_token) as f64;
    let most = memory_bandwidth / bytes_per_token;
    let least = ssd.as_ref().map(|(rate, _)| most.min(rate / per_token.max(1) as f64));
    if args.json {
        let mut found = plan.json(&inputs);
        found["expert_bytes_per_token"] = json!(per_token);
        found["memory_bytes_per_second"] = json!(memory_bandwidth);
        found["ssd_bytes_per_second"] = json!(ssd.as_ref().map(|s| s.0));
        found["tokens_per_second_all_in_memory"] = json!(most);
        found["tokens_per_second_none_in_memory"] = json!(least);
        println!("{found}");
        return Ok(());
    }
    println!("{}", plan.describe(&inputs));
    println!("memory: {}/s with {threads} threads", print::bytes(memory_bandwidth as u64));
    println!(
        "at most {most:.1} tokens/s, if every expert is in memory ({} a token)",
        print::bytes(bytes_per_token as u64)
    );
    match (&ssd, least) {
        (Some((rate, how)), Some(least)) => {
            println!("SSD: {}/s at {} a read ({how})", print::bytes(*rate as u64), print::bytes(inputs.slot_bytes));
            println!("at least {least:.1} tokens/s by the SSD, if none is ({} a token)", print::bytes(per_token));
        }
        _ => println!("SSD: not measured, because only a store is read expert by expert"),
    }
    Ok(())
}

/// The same with a GPU: what would be where. What that allows depends on what is found where; `bench` measures it.
fn on_gpu(args: &PlanArgs, model: &OpenModel, inputs: PlanInputs, gpu: &GpuParts) -> Result<()> {
    let (inputs, vram) = tier_inputs(model, &args.engine, inputs, gpu)?;
    let plan = tiers::decide(&inputs, &vram, &args.engine)?;
    match args.json {
        true => println!("{}", plan.json(&inputs, &vram)),
        false => println!("{}", plan.describe(&inputs, &vram)),
    }
    Ok(())
}
