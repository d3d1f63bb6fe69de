//! `larder store`.

use anyhow::{Context, Result, bail};
use larder_runtime::{blueprint_of, find_tower, seeing_models};
use larder_store::{Source, Store, add_vision, open_source, seal_sidecars, set_config};
use serde_json::{Value, json};

use crate::cli::store::{AddVisionArgs, Assignment, SealArgs, SetArgs, StoreArgs, StoreCommand};
use crate::print;
use crate::progress::StoreProgress;

/// Maintains a store.
pub fn run(args: &StoreArgs) -> Result<()> {
    match &args.command {
        StoreCommand::Set(args) => run_set(args),
        StoreCommand::Seal(args) => run_seal(args),
        StoreCommand::AddVision(args) => run_add_vision(args),
    }
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

/// Adds the image tower of a source.
fn run_add_vision(args: &AddVisionArgs) -> Result<()> {
    let AddVisionArgs { source, store, json } = args;
    let made = Store::open_partial(store)?;
    let blueprint = blueprint_of(&made)?;
    let name = source.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let found = if name.contains("mmproj") && source.is_file() {
        find_tower(&made, Some(source), &blueprint)?
    } else {
        let source = open_source(source)?;
        let other = blueprint_of(source.as_ref())?.model_type;
        if other != blueprint.model_type {
            bail!("{}: is a {other}, and the store a {}", source.path().display(), blueprint.model_type);
        }
        find_tower(source.as_ref(), None, &blueprint)?
    };
    let Some(tower) = found else {
        bail!(
            "{}: has no image tower that larder knows; models that see are those of type {}",
            source.display(),
            seeing_models()
        )
    };
    let progress = StoreProgress::new("adding the image tower");
    let bytes = add_vision(store, &tower.source, &progress)?;
    progress.finish();
    if *json {
        println!("{}", json!({ "bytes": bytes, "layers": tower.layers, "width": tower.width }));
    } else {
        let (layers, bytes) = (tower.layers, print::bytes(bytes));
        println!("{}: has the image tower of {layers} layers now, {bytes}", store.display());
    }
    Ok(())
}

/// Accepts sidecars that were copied into a store.
fn run_seal(args: &SealArgs) -> Result<()> {
    let sealed = seal_sidecars(&args.store)?;
    if args.json {
        println!("{}", json!(sealed));
    } else if sealed.is_empty() {
        println!("{}: holds none of {}", args.store.display(), larder_store::ADDED_SIDECARS.join(", "));
    } else {
        println!("{}: {} accepted", args.store.display(), sealed.join(", "));
    }
    Ok(())
}
