//! `larder convert`.

use anyhow::Result;
use larder_core::printable;
use larder_runtime::machine::memory;
use larder_runtime::{blueprint_of, check_sidecars, models, rounding_error};
use larder_store::{ConvertOptions, convert, open_source};
use serde_json::json;

use crate::cli::ConvertArgs;
use crate::{models::notices, print, progress::StoreProgress};

/// Converts a checkpoint or GGUF file to a store.
pub fn run(args: &ConvertArgs) -> Result<()> {
    let options = ConvertOptions { experts: args.experts.0, resident: args.resident.0, small_experts: args.small_copy };
    let (report, rounding) = match models::hub_name(&args.source) {
        Some(name) => (models::fetch(&name, &args.store, &options, &notices())?, None),
        None => {
            let source = open_source(&args.source)?;
            check_sidecars(source.as_ref())?;
            let progress = StoreProgress::new("converting");
            let blueprint = blueprint_of(source.as_ref())?;
            let report = convert(source.as_ref(), &blueprint, &args.store, &options, &progress)?;
            progress.finish();
            (report, rounding_error(source.as_ref(), &blueprint, &args.store)?)
        }
    };

    let seconds = report.took.as_secs_f64().max(1e-9);
    if args.json {
        let json = json!({
            "source_bytes": report.source_bytes,
            "store_bytes": report.store_bytes,
            "experts": report.experts,
            "experts_done_before": report.resumed,
            "notes": report.notes,
            "rounding_error": rounding,
            "seconds": seconds,
            "peak_memory_bytes": memory::peak(),
        });
        println!("{json}");
        return Ok(());
    }
    for note in &report.notes {
        eprintln!("note: {}", printable(note));
    }
    match rounding {
        Some(0.0) => eprintln!("the quantised weights are kept exactly"),
        Some(share) => eprintln!("rounding: the weights differ by {:.3} % (root mean square)", 100.0 * share),
        None => {}
    }
    if report.resumed > 0 {
        eprintln!("{} of {} experts were already converted", report.resumed, report.experts);
    }
    let peak = memory::peak().map_or_else(String::new, |peak| format!(", peak memory {}", print::bytes(peak)));
    println!(
        "{}: {} experts, {} from {} in {seconds:.1} s ({}/s written{peak})",
        args.store.display(),
        report.experts,
        print::bytes(report.store_bytes),
        print::bytes(report.source_bytes),
        print::bytes((report.store_bytes as f64 / seconds) as u64),
    );
    Ok(())
}
