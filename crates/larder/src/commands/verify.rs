//! `larder verify`.

use anyhow::{Result, bail};
use larder_core::printable;
use larder_store::{Division, verify};
use serde_json::json;

use crate::cli::store::VerifyArgs;
use crate::{print, progress::StoreProgress};

/// Checks every byte of a store against its checksums.
pub fn run(args: &VerifyArgs) -> Result<()> {
    let progress = StoreProgress::new("verifying");
    let report = verify(&args.store, &progress)?;
    progress.finish();
    if args.json {
        let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
        println!(
            "{}",
            json!({
                "good": report.is_good(),
                "files": report.files,
                "bytes": report.bytes,
                "problems": problems,
                "problem_count": report.problem_count,
                "unknown_files": report.unknown,
                "second": report.second.as_ref().map(|second| json!({
                    "division": second.division.name(),
                    "folder": second.folder,
                    "files": second.files,
                    "bytes": second.bytes,
                })),
            })
        );
    } else {
        for problem in &report.problems {
            println!("{problem}");
        }
        for file in &report.unknown {
            eprintln!("note: {} is not part of the store", printable(&file.to_string_lossy()));
        }
    }
    if !report.is_good() {
        let problems = print::count(report.problem_count as usize, "problem", "problems");
        let store = args.store.display();
        match report.second.as_ref() {
            Some(second) if !second.is_usable => bail!(
                "{store}: {problems} found; {} is not usable: connect its drive and verify again",
                second.folder.display()
            ),
            Some(second) if second.division == Division::Mirror => bail!(
                "{store}: {problems} found; delete the damaged files of experts, and `larder convert {store} {store} --also {}` copies \
                 them from the other folder; otherwise convert the model again",
                second.folder.display()
            ),
            _ => bail!("{store}: {problems} found; convert the model again"),
        }
    }
    if !args.json {
        println!("{}: {} files, {}, all good", args.store.display(), report.files, print::bytes(report.bytes));
        if let Some(second) = &report.second {
            let folder = printable(&second.folder.to_string_lossy());
            let (name, bytes) = (second.division.name(), print::bytes(second.bytes));
            println!("{folder}: {} of these, {bytes} ({name})", second.files);
        }
    }
    Ok(())
}
