//! Settings from larder.toml files and from environment variables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::Arg;
use clap::error::ErrorKind;
use larder_store::read_small;
use toml::{Table, Value};

use super::keys::{self, LeafCommand};
use crate::user_folders;

/// Name of a settings file.
const FILE: &str = "larder.toml";
/// Maximum size of a settings file.
const FILE_BYTES: u64 = 64 << 10;

/// Where a setting comes from; later ones take precedence.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Origin {
    /// The user's file.
    User(PathBuf),
    /// The file in a store.
    Store(PathBuf),
    /// An environment variable.
    Environment(String),
}

/// One setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The command that it applies to; `None` for all commands with this flag.
    pub section: Option<String>,
    /// The flag's long name.
    pub key: String,
    /// The values; `true` or `false` for a flag without value.
    pub values: Vec<String>,
    /// Where it comes from.
    pub origin: Origin,
}

impl Entry {
    /// Precedence: the environment above a store's file above the user's, and in a file a command's section above the rest.
    pub fn rank(&self) -> (u8, bool) {
        let origin = match self.origin {
            Origin::User(_) => 0,
            Origin::Store(_) => 1,
            Origin::Environment(_) => 2,
        };
        (origin, self.section.is_some())
    }
}

/// Path of the user's file.
pub fn user_file() -> Option<PathBuf> {
    user_folders::config().map(|dir| dir.join(FILE))
}

/// Path of a store's file.
pub fn store_file(store: &Path) -> PathBuf {
    store.join(FILE)
}

/// Reads the settings of the user's file, of the file in `store` and of the environment, looked up by `variable`.
pub fn read_all(
    leaves: &[LeafCommand],
    store: Option<&Path>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    if let Some(path) = user_file() {
        entries.extend(file(leaves, Origin::User(path.clone()), &path)?);
    }
    if let Some(path) = store.map(store_file) {
        entries.extend(file(leaves, Origin::Store(path.clone()), &path)?);
    }
    entries.extend(environment(leaves, variable)?);
    Ok(entries)
}

fn file(leaves: &[LeafCommand], origin: Origin, path: &Path) -> Result<Vec<Entry>> {
    let Some(bytes) = read_small(path, FILE_BYTES)? else { return Ok(vec![]) };
    let text = String::from_utf8(bytes).with_context(|| format!("{}: is not UTF-8 text", path.display()))?;
    read(leaves, &origin, &text).with_context(|| path.display().to_string())
}

fn read(leaves: &[LeafCommand], origin: &Origin, text: &str) -> Result<Vec<Entry>> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| anyhow!("is not TOML: {}", one_line(&e)))?;
    let mut entries = Vec::new();
    for (name, value) in table {
        match value {
            Value::Table(section) => {
                let of = |leaf: &&LeafCommand| leaf.section() == name;
                let of_section: Vec<&LeafCommand> = leaves.iter().filter(of).collect();
                if of_section.is_empty() {
                    bail!("[{name}] is not a command that can be configured; the commands are {}", sections(leaves));
                }
                for (key, value) in section {
                    entries.push(parse_entry(&of_section, origin, Some(&name), &key, &value)?);
                }
            }
            value => entries.push(parse_entry(&leaves.iter().collect::<Vec<_>>(), origin, None, &name, &value)?),
        }
    }
    Ok(entries)
}

fn one_line(error: &toml::de::Error) -> String {
    error.message().replace('\n', ", ")
}

fn sections(leaves: &[LeafCommand]) -> String {
    let mut names: Vec<&str> = leaves.iter().map(LeafCommand::section).collect();
    names.dedup();
    names.join(", ")
}

fn parse_entry(
    leaves: &[&LeafCommand],
    origin: &Origin,
    section: Option<&str>,
    key: &str,
    value: &Value,
) -> Result<Entry> {
    let shown = section.map_or(key.to_owned(), |section| format!("[{section}] {key}"));
    let common = keys::shared_flags();
    let is_common = |arg: &Arg| common.iter().any(|c| c.get_id() == arg.get_id());
    let open = |arg: &&Arg| section.is_some() || is_common(arg);
    let found: Vec<(&LeafCommand, &Arg)> =
        leaves.iter().filter_map(|l| Some((*l, l.flag(key).filter(open)?))).collect();
    if found.is_empty() {
        let mut names: Vec<&str> = leaves.iter().flat_map(|l| l.flags().filter(open)).filter_map(keys::key).collect();
        names.sort_unstable();
        names.dedup();
        bail!("{shown} is not a known setting; known are {}", names.join(", "));
    }
    if matches!(origin, Origin::Store(_)) && !keys::is_store_key(key) {
        bail!("{shown} cannot be set by a store; a store can set {}", keys::all_store_keys());
    }
    let values = value_texts(found[0].1, value).with_context(|| shown.clone())?;
    for (leaf, arg) in &found {
        check(leaf, arg, &values).with_context(|| shown.clone())?;
    }
    Ok(Entry { section: section.map(str::to_owned), key: key.to_owned(), values, origin: origin.clone() })
}

/// A value of a file, as it would be typed on a command line.
fn value_texts(arg: &Arg, value: &Value) -> Result<Vec<String>> {
    let one = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        other => Err(anyhow!("must be a string or a number, not {}", other.type_str())),
    };
    match (keys::is_switch(arg), value) {
        (true, Value::Boolean(truth)) => Ok(vec![truth.to_string()]),
        (true, other) => bail!("must be true or false, not {}", other.type_str()),
        (false, Value::Array(all)) if matches!(arg.get_action(), clap::ArgAction::Append) => {
            all.iter().map(one).collect()
        }
        (false, value) => Ok(vec![one(value)?]),
    }
}

/// Checks a value by parsing it as a command line.
fn check(leaf: &LeafCommand, arg: &Arg, values: &[String]) -> Result<()> {
    let Some(key) = keys::key(arg).filter(|_| !keys::is_switch(arg)) else { return Ok(()) };
    let alone = leaf.command.clone().no_binary_name(true).mut_args(|arg| arg.required(false));
    let Err(error) = alone.try_get_matches_from(values.iter().map(|value| format!("--{key}={value}"))) else {
        return Ok(());
    };
    match error.kind() {
        // Other errors are about required arguments, which are missing here, and not about the value.
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let message = error.to_string();
            let lines: Vec<&str> = message.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
            bail!("{}", lines.join(" ").trim_start_matches("error: "))
        }
        _ => Ok(()),
    }
}

/// The name of a flag's environment variable.
pub fn variable_of(key: &str) -> String {
    format!("LARDER_{}", key.to_uppercase().replace('-', "_"))
}

fn environment(leaves: &[LeafCommand], variable: impl Fn(&str) -> Option<String>) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    for leaf in leaves {
        for arg in leaf.flags() {
            let Some(key) = keys::key(arg) else { continue };
            let name = variable_of(key);
            let Some(text) = variable(&name).filter(|text| !text.is_empty()) else { continue };
            let text = if keys::is_switch(arg) { parse_bool(&text).with_context(|| name.clone())? } else { text };
            let values = vec![text];
            check(leaf, arg, &values).with_context(|| name.clone())?;
            let new = Entry { section: None, key: key.to_owned(), values, origin: Origin::Environment(name) };
            if !entries.contains(&new) {
                entries.push(new);
            }
        }
    }
    Ok(entries)
}

fn parse_bool(text: &str) -> Result<String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok("true".into()),
        "0" | "false" | "no" | "off" => Ok("false".into()),
        _ => bail!("must be true or false, not {text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(text: &str) -> Result<Vec<Entry>> {
        read(&LeafCommand::all(), &Origin::User("u".into()), text)
    }

    #[test]
    fn values_become_text_as_if_typed() {
        let entries =
            user("temperature = 0.5\nmlock = true\ncache-mem = \"4G\"\n[run]\nstop = [\"a\", \"b\"]\n").unwrap();
        let of = |key: &str| entries.iter().find(|s| s.key == key).unwrap();
        assert_eq!(of("temperature").values, ["0.5"]);
        assert_eq!(of("mlock").values, ["true"]);
        assert_eq!((of("stop").values.len(), of("stop").section.as_deref()), (2, Some("run")));
    }

    #[test]
    fn errors_name_the_key() {
        for (text, parts) in [
            ("temprature = 1", ["temprature", "known are"]),
            ("model = \"x\"", ["model", "known are"]),
            ("telemetry = \"x\"", ["telemetry", "known are"]),
            ("[runn]\nseed = 1", ["[runn]", "the commands are bench, chat"]),
            ("[run]\nseeed = 1", ["[run] seeed", "seed"]),
            ("temperature = \"hot\"", ["temperature", "invalid"]),
            ("eviction = \"youngest\"", ["eviction", "youngest"]),
            ("[chat]\nrouting = \"prior:lambda=x\"", ["[chat] routing", "lambda"]),
            ("temperature = true", ["temperature", "must be a string or a number"]),
            ("mlock = 1", ["mlock", "true or false"]),
            ("cache-scope = \"town\"", ["cache-scope", "layer"]),
            ("seed = [1]", ["seed", "must be"]),
            ("seed 1", ["is not TOML", ""]),
        ] {
            let message = format!("{:#}", user(text).unwrap_err());
            assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{text}: {message}");
        }
    }

    #[test]
    fn a_store_can_set_some_keys_only() {
        let store = |text: &str| read(&LeafCommand::all(), &Origin::Store("s".into()), text);
        assert_eq!(store("routing = \"prior:lambda=0.1\"\n[run]\ncache-experts = 3").unwrap().len(), 2);
        for text in ["trace = \"/x\"", "[run]\ntelemetry = \"/x\"", "mlock = true", "evictor = \"/x\""] {
            assert!(format!("{:#}", store(text).unwrap_err()).contains("cannot be set by a store"), "{text}");
        }
    }

    #[test]
    fn environment_variables_are_named_after_flags() {
        let with = |name: &'static str, value: &'static str| {
            environment(&LeafCommand::all(), move |key| (key == name).then(|| value.to_owned()))
        };
        let entries = with("LARDER_TOP_K", "40").unwrap();
        assert_eq!((entries.len(), entries[0].key.as_str(), entries[0].values[0].as_str()), (1, "top-k", "40"));
        assert_eq!(with("LARDER_MLOCK", "YES").unwrap()[0].values, ["true"]);
        assert!(with("LARDER_TOP_K", "").unwrap().is_empty());
        assert!(with("LARDER_TOP_K", "x").is_err() && with("LARDER_MLOCK", "perhaps").is_err());
    }
}
