use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Result, bail};
use serde_json::json;

use crate::cli::machine::{ListModels, Models, ModelsCommand, RemoveModel};
use crate::models::{self, Kept};
use crate::print;

/// Lists, finds and removes the models that larder keeps.
pub fn run(args: &Models) -> Result<()> {
    match &args.command {
        ModelsCommand::List(args) => list(args),
        ModelsCommand::Rm(args) => remove(args),
        ModelsCommand::Path(args) => {
            let path = args.name.as_ref().map_or_else(models::folder, models::place)?;
            println!("{}", path.display());
            Ok(())
        }
    }
}

fn list(args: &ListModels) -> Result<()> {
    let folder = models::folder()?;
    let kept = models::all(&folder)?;
    if args.json {
        let of =
            |m: &Kept| json!({"name": m.name.to_string(), "path": m.path, "bytes": m.bytes, "complete": m.complete});
        println!("{}", json!(kept.iter().map(of).collect::<Vec<_>>()));
        return Ok(());
    }
    if kept.is_empty() {
        eprintln!("no models in {}", folder.display());
    }
    for Kept { name, bytes, complete, .. } in &kept {
        let state = if *complete { "" } else { "  incomplete; naming it with -m goes on" };
        println!("{:>9}  {name}{state}", print::bytes(*bytes));
    }
    Ok(())
}

fn remove(RemoveModel { name, yes }: &RemoveModel) -> Result<()> {
    let folder = models::folder()?;
    let Some(kept) = models::all(&folder)?.into_iter().find(|kept| kept.name == *name) else {
        bail!("there is no {name} in {}", folder.display());
    };
    if !yes && !confirmed(&format!("remove {name}, {} in {}?", print::bytes(kept.bytes), kept.path.display()))? {
        bail!("{name} was not removed");
    }
    models::forget(&kept.path)?;
    println!("removed {name}, {}", print::bytes(kept.bytes));
    Ok(())
}

/// Asks whoever sits at the terminal.
fn confirmed(question: &str) -> Result<bool> {
    let input = std::io::stdin();
    if !input.is_terminal() {
        bail!("removing asks first, and there is nobody to ask; say --yes");
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
