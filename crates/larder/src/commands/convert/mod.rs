//! `larder convert`.

mod bits;

use std::{path::Path, sync::Arc};

use anyhow::{Result, anyhow, bail};
use larder_core::printable;
use larder_os::memory;
use larder_runtime::{blueprint_of, check_ignored, check_sidecars, kept_tower, models, rounding_error};
use larder_store::{
    AddedDrive, ConvertOptions, Division, FormatMix, Importance, Manifest, MtpTensors, add_drive, check_second_folder,
    convert, identity, open_source_with, read_small,
};
use serde_json::{Value, json};

use crate::cli::ConvertArgs;
use crate::{models::notices, print, progress::StoreProgress};

/// Bytes of the longest file of `--mix`.
const MIX_LIMIT: u64 = 1 << 20;

/// Converts a checkpoint or GGUF file to a store, or gives a finished store its second folder.
pub fn run(args: &ConvertArgs) -> Result<()> {
    let second = second(args);
    let importance = args.imatrix.as_deref().map(Importance::read).transpose()?;
    if let Some((_, folder)) = second {
        check_second_folder(&args.store, folder)?;
    }
    if let Some((division, folder)) = second.filter(|_| models::is_complete(&args.store)) {
        check_source(args, importance.as_ref())?;
        let added = add(args, division, folder)?;
        if args.json {
            println!("{}", json!({ "second": second_json(division, folder, Some(&added)) }));
        }
        return Ok(());
    }
    let chosen = match (args.bits.bits, &args.bits.text) {
        (Some(bits), Some(text)) => Some(bits::choose(args, bits, text, importance.as_ref())?),
        _ => None,
    };
    let options = ConvertOptions {
        experts: args.experts.0,
        resident: args.resident.0,
        mix: match (&args.mix, &chosen) {
            (Some(path), _) => read_mix(path)?,
            (None, Some(chosen)) => chosen.mix.clone(),
            (None, None) => FormatMix::default(),
        },
        importance: importance.map(Arc::new),
        small_experts: args.small_copy,
        tower: None,
        stripe: args.stripe.clone(),
    };
    let (report, rounding) = match models::hub_name(&args.source) {
        Some(_) if args.mmproj.is_some() => bail!(
            "--mmproj is for a source on disk; leave it out, and then use `larder store add-vision FILE {}`",
            args.store.display()
        ),
        Some(name) => (models::fetch(&name, &args.store, &options, &args.opening(), &notices())?, None),
        None => {
            let source = open_source_with(&args.source, args.opening())?;
            check_ignored(source.as_ref(), &args.ignore_config.keys)?;
            check_sidecars(source.as_ref())?;
            let progress = StoreProgress::new("converting");
            let blueprint = blueprint_of(source.as_ref())?;
            let (tower, note) = kept_tower(source.as_ref(), args.mmproj.as_deref(), &blueprint)?;
            let options = ConvertOptions { tower, ..options };
            let mut report = convert(source.as_ref(), &blueprint, &args.store, &options, &progress)?;
            report.notes.extend(note);
            progress.finish();
            (report, rounding_error(source.as_ref(), &blueprint, &args.store)?)
        }
    };

    let mirror = args.also.as_deref().map(|folder| add(args, Division::Mirror, folder)).transpose()?;
    let seconds = report.took.as_secs_f64().max(1e-9);
    if args.json {
        let json = json!({
            "source_bytes": report.source_bytes,
            "store_bytes": report.store_bytes,
            "experts": report.experts,
            "experts_done_before": report.resumed,
            "second": second.map(|(division, folder)| second_json(division, folder, mirror.as_ref())),
            "notes": report.notes,
            "rounding_error": rounding,
            "formats": chosen.as_ref().map(bits::json),
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

/// Reads the rules of `--mix`.
fn read_mix(path: &Path) -> Result<FormatMix> {
    let Some(bytes) = read_small(path, MIX_LIMIT)? else { bail!("{}: there is no such file", path.display()) };
    let text = String::from_utf8(bytes).map_err(|_| anyhow!("{}: is not UTF-8 text", path.display()))?;
    FormatMix::parse(&text).map_err(|why| anyhow!("{}: {why}", path.display()))
}

/// The second folder that the flags name.
fn second(args: &ConvertArgs) -> Option<(Division, &Path)> {
    let mirror = args.also.as_deref().map(|folder| (Division::Mirror, folder));
    mirror.or_else(|| args.stripe.as_deref().map(|folder| (Division::Stripe, folder)))
}

/// Gives the finished store its second folder, or what is missing there.
fn add(args: &ConvertArgs, division: Division, folder: &Path) -> Result<AddedDrive> {
    let progress = StoreProgress::new("copying");
    let added = add_drive(&args.store, division, folder, &progress)?;
    progress.finish();
    let AddedDrive { written, shards, bytes, same_drive } = added;
    if same_drive {
        eprintln!("note: {} is on the same file system as the store, so reads get no faster", folder.display());
    }
    if !args.json {
        let what = match division {
            Division::Mirror => "a copy of every expert",
            Division::Stripe => "every other expert",
        };
        println!(
            "{}: {what}, {shards} files of {}, {written} of them written now",
            folder.display(),
            print::bytes(bytes)
        );
    }
    Ok(added)
}

fn second_json(division: Division, folder: &Path, added: Option<&AddedDrive>) -> Value {
    json!({
        "division": division.name(),
        "folder": folder,
        "files": added.map(|added| added.shards),
        "bytes": added.map(|added| added.bytes),
        "files_written": added.map(|added| added.written),
    })
}

/// Refuses a source, formats or an importance matrix other than those that the finished store was made of. The store
/// itself and a name on the hub can stand for its source.
fn check_source(args: &ConvertArgs, importance: Option<&Importance>) -> Result<()> {
    let (manifest, _) = Manifest::read(&args.store)?;
    let made = &manifest.source;
    let (store, source) = (args.store.display(), args.source.display());
    let formats = [
        (args.experts.0, Some(&made.experts)),
        (args.resident.0, Some(&made.resident)),
        (args.small_copy, made.small_experts.as_ref()),
    ];
    if formats.into_iter().any(|(wanted, made)| wanted.is_some_and(|kind| made.is_none_or(|made| made != kind.name())))
    {
        bail!("{store}: already holds a store in other number formats; remove it or choose another target");
    }
    if importance.is_some_and(|given| made.imatrix.as_ref().is_none_or(|made| made.digest != given.digest())) {
        bail!(
            "{store}: already holds a store that was made without this importance matrix; remove it or choose another target"
        );
    }
    if args.mtp && manifest.mtp() == MtpTensors::LeftOut {
        bail!(
            "{store}: already holds a store without a layer for multi-token prediction; remove it or choose another target"
        );
    }
    let is_store = args.source.canonicalize().ok().is_some_and(|path| args.store.canonicalize().ok() == Some(path));
    if is_store || models::hub_name(&args.source).is_some() {
        return Ok(());
    }
    let source_model = open_source_with(&args.source, manifest.source_options())?;
    let blueprint = blueprint_of(source_model.as_ref())?;
    if made.identity != Some(identity(source_model.as_ref(), &blueprint)?) {
        bail!("{store}: already holds a store, which was not made of {source}; remove it or choose another target");
    }
    Ok(())
}
