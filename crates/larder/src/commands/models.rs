//! `larder models`.

use anyhow::{Result, bail};
use serde_json::json;

use crate::cli::machine::{ListModelsArgs, ModelsArgs, ModelsCommand, RemoveModelArgs};
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

fn list(args: &ListModelsArgs) -> Result<()> {
    let folder = models::folder()?;
    let installed = models::installed(&folder)?;
    if args.json {
        let of = |m: &InstalledModel| json!({"name": m.name.to_string(), "path": m.path, "bytes": m.bytes, "complete": m.complete});
        println!("{}", json!(installed.iter().map(of).collect::<Vec<_>>()));
        return Ok(());
    }
    if installed.is_empty() {
        eprintln!("no models in {}", folder.display());
    }
    for InstalledModel { name, bytes, complete, .. } in &installed {
        let state = if *complete { "" } else { "  incomplete; use it with -m to continue the download" };
        println!("{:>9}  {name}{state}", print::bytes(*bytes));
    }
    Ok(())
}

fn remove(RemoveModelArgs { name, yes }: &RemoveModelArgs) -> Result<()> {
    let folder = models::folder()?;
    let Some(installed) = models::installed(&folder)?.into_iter().find(|installed| installed.name == *name) else {
        bail!("{name} is not in {}; `larder models list` shows what is", folder.display());
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
