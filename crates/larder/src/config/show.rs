//! `larder config`: the effective settings and their origin.

use anyhow::Result;
use serde_json::{Value, json};

use super::keys::{self, ConfigKey, LeafCommand};
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

/// A key with its value and the origin of that.
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

/// A row for each shared key, and one for each command with a value of its own.
fn rows(leaves: &[LeafCommand], entries: &[Entry]) -> Vec<Row> {
    let shared = keys::shared();
    let last = |name: &str, section: Option<&str>| {
        let fits = |s: &&Entry| s.key == name && (s.section.is_none() || s.section.as_deref() == section);
        entries.iter().filter(fits).max_by_key(|s| s.rank())
    };
    let common = shared.iter().map(|key| row(None, key, last(key.name(), None)));
    let mut own: Vec<(&str, &ConfigKey)> = Vec::new();
    for (leaf, key) in leaves.iter().flat_map(|leaf| leaf.keys.iter().map(move |key| (leaf, key))) {
        let (name, section) = (key.name(), leaf.section());
        let has_own_row = if shared.iter().any(|shared| shared.name() == name) {
            entries.iter().any(|s| s.key == name && s.section.as_deref() == Some(section))
        } else {
            last(name, Some(section)).is_some()
        };
        if has_own_row && !own.iter().any(|(other, known)| *other == section && known.name() == name) {
            own.push((section, key));
        }
    }
    let own = own.into_iter().map(|(section, key)| row(Some(section), key, last(key.name(), Some(section))));
    common.chain(own).collect()
}

fn row(command: Option<&str>, key: &ConfigKey, entry: Option<&Entry>) -> Row {
    Row {
        command: command.map(str::to_owned),
        key: key.name().to_owned(),
        value: entry.map_or(key.default(), |entry| Some(entry.values.join(", "))),
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
