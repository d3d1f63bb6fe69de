//! `larder plan`.

use anyhow::{Result, anyhow};
use larder_core::printable;
use larder_runtime::gpu::{self, GpuParts};
use larder_runtime::machine::rates::{self, SsdThroughput};
use larder_runtime::plan::kv_places::{OtherKv, Planned};
use larder_runtime::plan::tier_speed::{DecodeBytes, TierRates};
use larder_runtime::plan::{PlanInputs, decide, tiers};
use larder_runtime::{OpenModel, Options, check_drafting, plan_inputs, tell_context, tier_inputs};
use larder_store::ExpertSource as _;
use serde_json::{Value, json};

use crate::cli::PlanArgs;
use crate::models;
use crate::print;

/// Prints the memory plan and the speed limits that memory and SSD set.
pub fn run(args: &PlanArgs) -> Result<()> {
    let model = models::open_to_plan(&args.model, &args.engine.settings, &args.ignore_config)?;
    let geometry = &model.blueprint.geometry;
    // The GPU is opened first, because its driver allocates memory.
    let gpu = gpu::open(&args.engine.settings.options.device)?;
    let options = models::options(&args.engine.settings, args.engine.settings.options.context)?;
    check_drafting(&model, &options)?;
    tell_context(&model, &options);
    let inputs = plan_inputs(&model, &options)?;
    if let Some(gpu) = gpu {
        return on_gpu(args, &model, &options, inputs, gpu);
    }
    let plan = decide(&inputs, &options)?;

    let threads = options.compute.threads;
    let memory_bandwidth = rates::memory_bandwidth(threads)?;
    let ssd = model.store().map(|store| rates::ssd_throughput(store, &options.cache.reader)).transpose()?;
    let per_token = inputs.expert_sizes.one_per_layer() * geometry.top_k as u64;
    let bytes_per_token = (model.resident_bytes_per_token()? + per_token) as f64;
    let most = memory_bandwidth / bytes_per_token;
    let least = ssd.as_ref().map(|ssd| most.min(ssd.rate / per_token.max(1) as f64));
    if args.json {
        let mut found = plan.json(&inputs);
        found["expert_bytes_per_token"] = json!(per_token);
        found["memory_bytes_per_second"] = json!(memory_bandwidth);
        found["ssd_bytes_per_second"] = json!(ssd.as_ref().map(|ssd| ssd.rate));
        found["drives_bytes_per_second"] = json!(ssd.as_ref().map(|ssd| &ssd.drives));
        found["tokens_per_second_all_in_memory"] = json!(most);
        found["tokens_per_second_none_in_memory"] = json!(least);
        println!("{found}");
        return Ok(());
    }
    println!("{}", plan.describe(&inputs));
    println!("memory: {}/s with {}", print::bytes(memory_bandwidth as u64), print::count(threads, "thread", "threads"));
    println!(
        "at most {most:.1} tokens/s, if all experts are in memory ({} per token)",
        print::bytes(bytes_per_token as u64)
    );
    match (&ssd, least) {
        (Some(SsdThroughput { rate, drives, how }), Some(least)) => {
            println!(
                "SSD: {}/s in reads of {} ({how})",
                print::bytes(*rate as u64),
                print::bytes(inputs.expert_sizes.largest())
            );
            let folders = model.store().map(|store| store.drive_folders()).unwrap_or_default();
            for (rate, folder) in drives.iter().zip(folders).filter(|_| folders.len() > 1) {
                println!("     {}/s from {}", print::bytes(*rate as u64), printable(&folder.to_string_lossy()));
            }
            println!(
                "about {least:.1} tokens/s if no expert is in memory, by the SSD ({} per token)",
                print::bytes(per_token)
            );
        }
        _ => println!("SSD: not measured; only a store is read expert by expert, make one with `larder convert`"),
    }
    Ok(())
}

/// With a GPU, prints the plan of both tiers, and the speed that it promises.
fn on_gpu(args: &PlanArgs, model: &OpenModel, options: &Options, inputs: PlanInputs, gpu: GpuParts) -> Result<()> {
    let (inputs, vram) = tier_inputs(model, options, inputs, &gpu)?;
    let plan = tiers::decide(&inputs, &vram, options)?;
    let store = model.store().ok_or_else(|| anyhow!("experts are copied to a GPU from a store only"))?;
    let geometry = &store.manifest().geometry;
    let measured = (gpu.measure)(store.layout(geometry.moe_layers[0]), geometry.top_k)?;
    let rates = TierRates {
        vram: measured.vram,
        link: measured.link_in,
        memory: rates::memory_bandwidth(options.compute.threads)?,
        ssd: rates::ssd_throughput(store, &options.cache.reader)?.rate,
    };
    let (resident, _) = model.resident_on_device()?;
    let experts = inputs.expert_sizes.one_per_layer() * geometry.top_k as u64;
    let bytes = DecodeBytes { resident, experts };
    let planned = Planned { plan: &plan, inputs: &inputs, vram: &vram, options, bytes, rates: &rates };
    let (speed, smaller, split) = (planned.speed(), planned.smaller_kv(), planned.better_split());
    if args.json {
        let mut found = plan.json(&inputs, &vram);
        found["expected"] = speed.json();
        found["smaller_kv"] = smaller.iter().map(OtherKv::json).collect();
        found["better_split"] = split.as_ref().map_or(Value::Null, OtherKv::json);
        println!("{found}");
        return Ok(());
    }
    println!("{}", plan.describe(&inputs, &vram));
    let of = |rate: f64| print::bytes(rate as u64);
    let TierRates { vram, link, memory, ssd } = rates;
    println!("VRAM: {}/s; to the GPU: {}/s; memory: {}/s; SSD: {}/s", of(vram), of(link), of(memory), of(ssd));
    println!("{}", speed.describe());
    smaller.iter().chain(&split).for_each(|smaller| println!("{}", smaller.describe(&speed)));
    Ok(())
}
