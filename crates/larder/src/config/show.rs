//! `larder config`: the effective settings and their origin.

use anyhow::Result;
use clap::Arg;
use serde_json::{Value, json};

use super::keys::{self, LeafCommand};
use super::layers::{self, Entry, Origin};
use crate::cli::machine::{ConfigArgs, ConfigCommand, ConfigShowArgs};
use crate::{models, print};

/// Runs a command of `larder config`.
pub fn run(args: &ConfigArgs) -> Result<()> {
    match &args.command {
        ConfigCommand::Show(args) => show(args),
        ConfigCommand::Path => {
            match layers::user_file() {
                Some(path) => println!("{}", path.display()),
                None => anyhow::bail!("neither XDG_CONFIG_HOME nor HOME is set, so there is no folder for larder.toml"),
            }
            Ok(())
        }
    }
}

/// The origin of an entry, as text.
pub fn origin_name(origin: &Origin) -> String {
    match origin {
        Origin::User(path) | Origin::Store(path) => path.display().to_string(),
        Origin::Environment(name) => name.clone(),
    }
}

/// A flag with its value and the origin of that.
struct Row {
    command: Option<String>,
    key: String,
    value: Option<String>,
    origin: Option<Origin>,
}

fn show(args: &ConfigShowArgs) -> Result<()> {
    let leaves = LeafCommand::all();
    let store = args.model.as_deref().map(|model| models::store_of(model).unwrap_or_else(|| model.to_owned()));
    let entries = layers::read_all(&leaves, store.as_deref(), super::variable)?;
    let rows = rows(&leaves, &entries);
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

/// A row for each shared flag, and one for each command with a setting of its own.
fn rows(leaves: &[LeafCommand], entries: &[Entry]) -> Vec<Row> {
    let shared = keys::shared_flags();
    let last = |key: &str, section: Option<&str>| {
        let fits = |s: &&Entry| s.key == key && (s.section.is_none() || s.section.as_deref() == section);
        entries.iter().filter(fits).max_by_key(|s| s.rank())
    };
    let common = shared.iter().filter_map(|arg| {
        let key = keys::key(arg)?;
        Some(row(None, arg, key, last(key, None)))
    });
    let mut own: Vec<(&str, &str, &Arg)> = Vec::new();
    for leaf in leaves {
        for (arg, key) in leaf.flags().filter_map(|arg| Some((arg, keys::key(arg)?))) {
            let is_shared = shared.iter().any(|s| s.get_id() == arg.get_id());
            let has_own_row = match is_shared {
                true => entries.iter().any(|s| s.key == key && s.section.as_deref() == Some(leaf.section())),
                false => last(key, Some(leaf.section())).is_some(),
            };
            if has_own_row && !own.iter().any(|(section, k, _)| *section == leaf.section() && *k == key) {
                own.push((leaf.section(), key, arg));
            }
        }
    }
    let own = own.into_iter().map(|(section, key, arg)| row(Some(section), arg, key, last(key, Some(section))));
    common.chain(own).collect()
}

fn row(command: Option<&str>, arg: &Arg, key: &str, entry: Option<&Entry>) -> Row {
    let default = match keys::is_switch(arg) {
        true => Some("false".to_owned()),
        false => arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned()),
    };
    Row {
        command: command.map(str::to_owned),
        key: key.to_owned(),
        value: entry.map_or(default, |entry| Some(entry.values.join(", "))),
        origin: entry.map(|entry| entry.origin.clone()),
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let name = self.command.as_ref().map_or(self.key.clone(), |command| format!("[{command}] {}", self.key));
        let from = self.origin.as_ref().map_or("default".to_owned(), origin_name);
        vec![name, self.value.clone().unwrap_or("-".into()), from]
    }

    fn json(&self) -> Value {
        let from = match &self.origin {
            None => "default",
            Some(Origin::User(_)) => "user",
            Some(Origin::Store(_)) => "store",
            Some(Origin::Environment(_)) => "environment",
        };
        let origin = self.origin.as_ref().map(origin_name);
        json!({"command": self.command, "key": self.key, "value": self.value, "from": from, "where": origin})
    }
}
