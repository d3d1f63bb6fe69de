//! What is set, and by whom.

use anyhow::Result;
use clap::Arg;
use serde_json::{Value, json};

use super::known::{self, Leaf};
use super::layers::{self, Origin, Said};
use crate::cli::machine::{Config, ConfigCommand, Show};
use crate::{models, print};

/// Shows what is set where.
pub fn run(args: &Config) -> Result<()> {
    match &args.command {
        ConfigCommand::Show(args) => show(args),
        ConfigCommand::Path => {
            match layers::user_file() {
                Some(path) => println!("{}", path.display()),
                None => anyhow::bail!("neither XDG_CONFIG_HOME nor HOME names a folder for a larder.toml"),
            }
            Ok(())
        }
    }
}

/// Who said something, for an error.
pub fn place(origin: &Origin) -> String {
    match origin {
        Origin::User(path) | Origin::Store(path) => path.display().to_string(),
        Origin::Environment(name) => name.clone(),
    }
}

/// A value of a flag, and where it is from.
struct Row {
    command: Option<String>,
    key: String,
    value: Option<String>,
    origin: Option<Origin>,
}

fn show(args: &Show) -> Result<()> {
    let leaves = Leaf::all();
    let store = args.model.as_deref().map(|model| models::store_of(model).unwrap_or_else(|| model.to_owned()));
    let said = layers::all(&leaves, store.as_deref(), super::variable)?;
    let rows = rows(&leaves, &said);
    let store = store.as_deref().map(layers::store_file);
    if args.json {
        let files = json!({"user": layers::user_file(), "store": store});
        let values: Vec<Value> = rows.iter().map(Row::json).collect();
        println!("{}", json!({"files": files, "values": values}));
        return Ok(());
    }
    print!("{}", print::columns(&rows.iter().map(Row::cells).collect::<Vec<_>>()));
    Ok(())
}

/// A row for each flag that all commands share, and one for each command that has something of its own.
fn rows(leaves: &[Leaf], said: &[Said]) -> Vec<Row> {
    let shared = known::shared();
    let last = |key: &str, section: Option<&str>| {
        let fits = |s: &&Said| s.key == key && (s.section.is_none() || s.section.as_deref() == section);
        said.iter().filter(fits).max_by_key(|s| s.rank())
    };
    let common = shared.iter().filter_map(|arg| {
        let key = known::key(arg)?;
        Some(row(None, arg, key, last(key, None)))
    });
    let mut own: Vec<(&str, &str, &Arg)> = Vec::new();
    for leaf in leaves {
        for (arg, key) in leaf.flags().filter_map(|arg| Some((arg, known::key(arg)?))) {
            let for_all = shared.iter().any(|s| s.get_id() == arg.get_id());
            let apart = match for_all {
                true => said.iter().any(|s| s.key == key && s.section.as_deref() == Some(leaf.section())),
                false => last(key, Some(leaf.section())).is_some(),
            };
            if apart && !own.iter().any(|(section, k, _)| *section == leaf.section() && *k == key) {
                own.push((leaf.section(), key, arg));
            }
        }
    }
    let own = own.into_iter().map(|(section, key, arg)| row(Some(section), arg, key, last(key, Some(section))));
    common.chain(own).collect()
}

fn row(command: Option<&str>, arg: &Arg, key: &str, said: Option<&Said>) -> Row {
    let usual = match known::is_switch(arg) {
        true => Some("false".to_owned()),
        false => arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned()),
    };
    Row {
        command: command.map(str::to_owned),
        key: key.to_owned(),
        value: said.map_or(usual, |said| Some(said.values.join(", "))),
        origin: said.map(|said| said.origin.clone()),
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let name = self.command.as_ref().map_or(self.key.clone(), |command| format!("[{command}] {}", self.key));
        let from = self.origin.as_ref().map_or("default".to_owned(), place);
        vec![name, self.value.clone().unwrap_or("-".into()), from]
    }

    fn json(&self) -> Value {
        let from = match &self.origin {
            None => "default",
            Some(Origin::User(_)) => "user",
            Some(Origin::Store(_)) => "store",
            Some(Origin::Environment(_)) => "environment",
        };
        let place = self.origin.as_ref().map(place);
        json!({"command": self.command, "key": self.key, "value": self.value, "from": from, "where": place})
    }
}
