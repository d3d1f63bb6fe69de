//! `larder store`.

use anyhow::Result;
use larder_store::{UpgradeReport, upgrade};
use serde_json::json;

use crate::cli::{StoreArgs, StoreCommand, UpgradeArgs};
use crate::{print, progress::StoreProgress};

/// Maintains a store.
pub fn run(args: &StoreArgs) -> Result<()> {
    match &args.command {
        StoreCommand::Upgrade(args) => run_upgrade(args),
    }
}

/// Brings a store of an earlier format to the current one.
fn run_upgrade(args: &UpgradeArgs) -> Result<()> {
    let progress = StoreProgress::new("upgrading");
    let UpgradeReport { from, to, shards, bytes: [before, after] } = upgrade(&args.store, &progress)?;
    progress.finish();
    let store = args.store.display();
    if args.json {
        println!("{}", json!({ "from": from, "to": to, "shards": shards, "bytes_before": before, "bytes": after }));
    } else if from == to {
        println!("{store}: has store format {to} already");
    } else {
        let (before, after) = (print::bytes(before), print::bytes(after));
        println!("{store}: store format {to} instead of {from}, {shards} shards of {after} in all instead of {before}");
    }
    Ok(())
}
