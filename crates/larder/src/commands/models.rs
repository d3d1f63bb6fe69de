//! `larder models`.

use anyhow::{Result, bail};
use serde_json::json;

use crate::cli::machine::{ListModelsArgs, ModelsArgs, ModelsCommand, PullArgs, RemoveModelArgs};
use crate::models::{self, InstalledModel};
use crate::{output, print};

/// Lists, locates and removes downloaded models.
pub fn run(args: &ModelsArgs) -> Result<()> {
    match &args.command {
        ModelsCommand::List(args) => list(args),
        ModelsCommand::Rm(args) => remove(args),
        ModelsCommand::Path(args) => {
            let path = args.name.as_ref().map_or_else(models::folder, models::store_path)?;
            println!("{}", path.display());
            Ok(())
        }
    }
}

/// Downloads a model, unless it is complete.
pub fn pull(PullArgs { name, ignore_config }: &PullArgs) -> Result<()> {
    let store = models::pull(name, ignore_config)?;
    println!("{name} is in {}; `larder chat {name}` talks with it", store.display());
    Ok(())
}

/// Lists downloaded models.
pub fn list(args: &ListModelsArgs) -> Result<()> {
    let folder = models::folder()?;
    let installed = models::installed(&folder)?;
    if args.json {
        let of = |m: &InstalledModel| json!({"name": m.name.to_string(), "path": m.path, "bytes": m.bytes, "complete": m.complete});
        println!("{}", json!(installed.iter().map(of).collect::<Vec<_>>()));
        return Ok(());
    }
    if installed.is_empty() {
        eprintln!("no models in {}; `larder pull org/name` downloads one", folder.display());
    }
    for InstalledModel { name, bytes, complete, .. } in &installed {
        let state = if *complete { "" } else { "  incomplete; `larder pull` goes on with it" };
        println!("{:>9}  {name}{state}", print::bytes(*bytes));
    }
    Ok(())
}

/// Removes a downloaded model.
pub fn remove(RemoveModelArgs { name, yes }: &RemoveModelArgs) -> Result<()> {
    let folder = models::folder()?;
    let Some(installed) = models::installed(&folder)?.into_iter().find(|installed| installed.name == *name) else {
        bail!("{name} is not in {}; `larder list` shows what is", folder.display());
    };
    if !yes
        && !output::confirmed(&format!(
            "remove {name}, {} in {}?",
            print::bytes(installed.bytes),
            installed.path.display()
        ))?
    {
        bail!("{name} was not removed; confirm on a terminal, or add --yes");
    }
    models::remove(&installed.path)?;
    println!("removed {name}, {}", print::bytes(installed.bytes));
    Ok(())
}
