use anyhow::Result;
use serde_json::json;

use crate::cli::Plan as Args;
use crate::experts::slot_bytes;
use crate::open::Model;
use crate::plan::{Facts, Plan, decide};
use crate::{memory, print, probe};

/// Says what would stay in memory, and what that allows at most.
pub fn run(args: &Args) -> Result<()> {
    let model = Model::open(&args.model)?;
    let geometry = &model.blueprint.geometry;
    let (resident, _) = model.bytes()?;
    let slot = slot_bytes(&model)?;
    let facts = Facts { geometry, resident, slot, available: memory::available() };
    let plan = decide(&facts, &args.cache)?;

    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory_rate = probe::memory_rate(threads);
    let ssd = model.store().map(|store| probe::ssd_rate(store, &args.cache.reader)).transpose()?;
    let per_token = slot * (geometry.top_k * geometry.moe_layers.len()) as u64;
    let touched = (model.touched_resident()? + per_token) as f64;
    let most = memory_rate / touched;
    let least = ssd.as_ref().map(|(rate, _)| most.min(rate / per_token.max(1) as f64));
    if args.json {
        let slots = match plan {
            Plan::AllResident => None,
            Plan::Slots { slots, .. } => Some(slots),
        };
        println!(
            "{}",
            json!({
                "resident_bytes": resident,
                "expert_bytes": slot,
                "slots": slots,
                "available_bytes": facts.available,
                "expert_bytes_per_token": per_token,
                "memory_bytes_per_second": memory_rate,
                "ssd_bytes_per_second": ssd.as_ref().map(|s| s.0),
                "tokens_per_second_all_in_memory": most,
                "tokens_per_second_none_in_memory": least,
            })
        );
        return Ok(());
    }
    println!("{}", plan.sentence(&facts));
    if let Some(available) = facts.available {
        println!("available: {}", print::bytes(available));
    }
    println!("memory: {}/s with {threads} threads", print::bytes(memory_rate as u64));
    println!("at most {most:.1} tokens/s, if every expert is in memory ({} a token)", print::bytes(touched as u64));
    match (&ssd, least) {
        (Some((rate, how)), Some(least)) => {
            println!("SSD: {}/s at {} a read ({how})", print::bytes(*rate as u64), print::bytes(slot));
            println!("at least {least:.1} tokens/s by the SSD, if none is ({} a token)", print::bytes(per_token));
        }
        _ => println!("SSD: not measured, because only a store is read expert by expert"),
    }
    Ok(())
}
