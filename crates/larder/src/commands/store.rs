//! `larder store`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_runtime::blueprint_of;
use larder_store::{
    Manifest, Source, Store, UpgradeReport, open_source_with, record_source, seal_sidecars, set_config, upgrade,
};
use serde_json::{Value, json};

use crate::cli::store::{Assignment, SealArgs, SetArgs, StoreArgs, StoreCommand, UpgradeArgs};
use crate::{print, progress::StoreProgress};

/// Maintains a store.
pub fn run(args: &StoreArgs) -> Result<()> {
    match &args.command {
        StoreCommand::Upgrade(args) => run_upgrade(args),
        StoreCommand::Set(args) => run_set(args),
        StoreCommand::Seal(args) => run_seal(args),
    }
}

/// Brings a store of an earlier format to the current one, and records its source.
fn run_upgrade(args: &UpgradeArgs) -> Result<()> {
    let progress = StoreProgress::new("upgrading");
    let UpgradeReport { from, to, shards, bytes: [before, after] } = upgrade(&args.store, &progress)?;
    progress.finish();
    let recorded = args.source.as_deref().map(|source| record(&args.store, source)).transpose()?;
    let store = args.store.display();
    if args.json {
        let source = recorded.map(|new| if new { "recorded" } else { "known" });
        let bytes_before = before;
        println!(
            "{}",
            json!({ "from": from, "to": to, "shards": shards, "bytes_before": bytes_before, "bytes": after, "source": source })
        );
        return Ok(());
    }
    if from == to {
        println!("{store}: has store format {to} already");
    } else {
        let (before, after) = (print::bytes(before), print::bytes(after));
        println!("{store}: store format {to} instead of {from}, {shards} shards of {after} in all instead of {before}");
    }
    match recorded {
        Some(true) => println!("{store}: its source is recorded"),
        Some(false) => println!("{store}: its source was recorded before, and is the same"),
        None => {}
    }
    Ok(())
}

fn record(store: &Path, source: &Path) -> Result<bool> {
    let source = open_source_with(source, Manifest::read(store)?.0.source_options())?;
    Ok(record_source(store, source.as_ref(), &blueprint_of(source.as_ref())?)?)
}

/// Changes keys of the config.
fn run_set(args: &SetArgs) -> Result<()> {
    let store = Store::open_partial(&args.store)?;
    let mut config = store.config().clone();
    let changes = args.changes.iter().map(|change| Ok((change, assign(&mut config, change)?)));
    let changes: Vec<(&Assignment, Option<Value>)> = changes.collect::<Result<_>>()?;
    let blueprint = larder_model::blueprint(&config).with_context(|| args.store.display().to_string())?;
    set_config(&args.store, config, &blueprint)?;
    if args.json {
        let list = changes.iter().map(|(change, old)| json!({"key": change.key, "old": old, "new": change.value}));
        println!("{}", Value::from_iter(list));
        return Ok(());
    }
    for (change, old) in changes {
        let old = old.map_or("(not set)".into(), |old| old.to_string());
        println!("{}: {old} → {}", change.key, change.value);
    }
    let sidecars = larder_store::ADDED_SIDECARS.into_iter().filter(|name| args.store.join(name).exists());
    sidecars.for_each(|name| {
        eprintln!("note: {name} was made before this change; make it again, or accept it with `larder store seal`")
    });
    Ok(())
}

/// Sets a key of a config and returns its old value. The value must be of the same type as before.
fn assign(config: &mut Value, Assignment { key, value }: &Assignment) -> Result<Option<Value>> {
    let (parents, last) = key.rsplit_once('.').unwrap_or(("", key));
    let mut at = config;
    for name in parents.split('.').filter(|name| !name.is_empty()) {
        at = at.get_mut(name).with_context(|| format!("{key}: the config has no '{name}'"))?;
    }
    let object = at.as_object_mut().with_context(|| format!("{key}: '{parents}' has no keys"))?;
    let old = object.get(last).cloned();
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    match &old {
        Some(old) if !old.is_null() && !value.is_null() && kind(old) != kind(value) => {
            bail!("{key}: is {}, but {value} is {}", kind(old), kind(value))
        }
        _ => {}
    }
    object.insert(last.to_owned(), value.clone());
    Ok(old)
}

/// Accepts sidecars that were copied into a store, and the manifest of format 1.
fn run_seal(args: &SealArgs) -> Result<()> {
    let sealed = seal_sidecars(&args.store)?;
    if args.json {
        println!("{}", json!(sealed));
    } else if sealed.is_empty() {
        println!("{}: holds neither of {}", args.store.display(), larder_store::ADDED_SIDECARS.join(", "));
    } else {
        println!("{}: {} accepted", args.store.display(), sealed.join(", "));
    }
    Ok(())
}
