//! Settings from larder.toml files and from environment variables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::error::ErrorKind;
use larder_runtime::settings::{RENAMED, RenamedSetting, renamed};
use larder_store::read_small;
use toml::{Table, Value};

use super::keys::{self, ConfigKey, LeafCommand};
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

/// The name of an earlier version is used: what it is now.
#[derive(Debug)]
pub struct MovedName(String);

impl std::fmt::Display for MovedName {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MovedName {}

/// One setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The command that it applies to; `None` for all commands that have it.
    pub section: Option<String>,
    /// The name of the flag or setting.
    pub key: String,
    /// The values; `true` or `false` for a switch.
    pub values: Vec<String>,
    /// Where it comes from.
    pub origin: Origin,
}

impl Entry {
    /// Precedence: the environment above a store's file above the user's, and in a file a command's section above the
    /// rest.
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
    name: &str,
    value: &Value,
) -> Result<Entry> {
    let shown = section.map_or(name.to_owned(), |section| format!("[{section}] {name}"));
    let common = keys::shared();
    let open = |key: &&ConfigKey| section.is_some() || common.iter().any(|common| common.name() == key.name());
    let found: Vec<(&LeafCommand, &ConfigKey)> =
        leaves.iter().filter_map(|leaf| Some((*leaf, leaf.key(name).filter(open)?))).collect();
    if found.is_empty() {
        return Err(unknown(leaves, open, name, &shown, value));
    }
    if matches!(origin, Origin::Store(_)) && !keys::is_store_key(name) {
        bail!("{shown} cannot be set by a store; a store can set {}", keys::all_store_keys());
    }
    let values = value_texts(found[0].1, value).with_context(|| shown.clone())?;
    for (leaf, key) in &found {
        check(leaf, key, &values).with_context(|| shown.clone())?;
    }
    Ok(Entry { section: section.map(str::to_owned), key: name.to_owned(), values, origin: origin.clone() })
}

/// Why there is no such key, with what it is now if it is one of an earlier version.
fn unknown(
    leaves: &[&LeafCommand],
    open: impl Fn(&&ConfigKey) -> bool,
    name: &str,
    shown: &str,
    value: &Value,
) -> anyhow::Error {
    if let Some(row) = renamed(name) {
        let old = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        return MovedName(format!("{shown} = {value} is now {} = {:?}", row.new, row.value_of(&old))).into();
    }
    let mut names: Vec<&str> =
        leaves.iter().flat_map(|leaf| leaf.keys.iter().filter(&open)).map(ConfigKey::name).collect();
    names.sort_unstable();
    names.dedup();
    anyhow!("{shown} is not a known setting; known are {}", names.join(", "))
}

/// A value of a file, as it would be typed on a command line.
fn value_texts(key: &ConfigKey, value: &Value) -> Result<Vec<String>> {
    let one = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        other => Err(anyhow!("must be a string or a number, not {}", other.type_str())),
    };
    match (key.is_switch(), value) {
        (true, Value::Boolean(truth)) => Ok(vec![truth.to_string()]),
        (true, other) => bail!("must be true or false, not {}", other.type_str()),
        (false, Value::Array(all)) if key.is_list() => all.iter().map(one).collect(),
        (false, value) => Ok(vec![one(value)?]),
    }
}

/// Checks a value, that of a flag by parsing it as a command line.
fn check(leaf: &LeafCommand, key: &ConfigKey, values: &[String]) -> Result<()> {
    if let ConfigKey::Setting(row) = key {
        return values.iter().try_for_each(|value| row.check(value)).map_err(|why| anyhow!(why));
    }
    if key.is_switch() {
        return Ok(());
    }
    let alone = leaf.command.clone().no_binary_name(true).mut_args(|arg| arg.required(false));
    let Err(error) = alone.try_get_matches_from(values.iter().flat_map(|value| key.typed(value))) else {
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

/// The name of an environment variable.
pub fn variable_of(key: &str) -> String {
    format!("LARDER_{}", key.to_uppercase().replace('-', "_"))
}

fn environment(leaves: &[LeafCommand], variable: impl Fn(&str) -> Option<String>) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    let value_of = |name: &str| variable(name).filter(|text| !text.is_empty());
    for (leaf, key) in leaves.iter().flat_map(|leaf| leaf.keys.iter().map(move |key| (leaf, key))) {
        let name = variable_of(key.name());
        let Some(text) = value_of(&name) else { continue };
        let text = if key.is_switch() { parse_bool(&text).with_context(|| name.clone())? } else { text };
        let values = vec![text];
        check(leaf, key, &values).with_context(|| name.clone())?;
        let new = Entry { section: None, key: key.name().to_owned(), values, origin: Origin::Environment(name) };
        if !entries.contains(&new) {
            entries.push(new);
        }
    }
    let is_gone = |row: &&RenamedSetting| leaves.iter().all(|leaf| leaf.key(row.old).is_none());
    for row in RENAMED.iter().filter(is_gone) {
        let (old, new) = (variable_of(row.old), variable_of(row.new));
        if let Some(value) = value_of(&old) {
            return Err(MovedName(format!("{old}={value} is now {new}={}", row.value_of(&value))).into());
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
    use larder_runtime::settings::SETTINGS;

    use super::*;

    fn user(text: &str) -> Result<Vec<Entry>> {
        read(&LeafCommand::all(), &Origin::User("u".into()), text)
    }

    #[test]
    fn values_become_text_as_if_typed() {
        let entries = user("temperature = 0.5\nmlock = true\ncache = \"4G\"\n[run]\nstop = [\"a\", \"b\"]\n").unwrap();
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
            ("scope = \"town\"", ["scope", "layer"]),
            ("seed = [1]", ["seed", "must be"]),
            ("seed 1", ["is not TOML", ""]),
        ] {
            let message = format!("{:#}", user(text).unwrap_err());
            assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{text}: {message}");
        }
    }

    #[test]
    fn each_setting_can_stand_in_files_and_in_the_environment() {
        let leaves = LeafCommand::all();
        for row in SETTINGS {
            let value = if row.is_switch() { row.example.to_owned() } else { format!("{:?}", row.example) };
            for section in ["", "[run]\n"] {
                let found = user(&format!("{section}{} = {value}", row.name)).unwrap();
                assert_eq!(found[0].values, [row.example], "{}", row.name);
            }
            let of_store = read(&leaves, &Origin::Store("s".into()), &format!("{} = {value}", row.name));
            assert_eq!(of_store.is_ok(), row.by_store, "{}", row.name);
            let variable = |name: &str| (name == variable_of(row.name)).then(|| row.example.to_owned());
            assert_eq!(environment(&leaves, variable).unwrap()[0].key, row.name);
        }
    }

    #[test]
    fn earlier_names_say_what_they_are_now() {
        for row in RENAMED {
            let wanted = format!("is now {} = {:?}", row.new, row.value_of("4"));
            let said = format!("{:#}", user(&format!("{} = \"4\"", row.old)).unwrap_err());
            assert_eq!(said, format!("{} = \"4\" {wanted}", row.old));
        }
        let old = |name: &str| (name == "LARDER_CACHE_EXPERTS").then(|| "4".to_owned());
        let said = environment(&LeafCommand::all(), old).unwrap_err().to_string();
        assert_eq!(said, "LARDER_CACHE_EXPERTS=4 is now LARDER_CACHE=4x");
        let said = user("cache-experts = 3").unwrap_err().to_string();
        assert_eq!(said, "cache-experts = 3 is now cache = \"3x\"");
    }

    #[test]
    fn a_store_can_set_some_keys_only() {
        let store = |text: &str| read(&LeafCommand::all(), &Origin::Store("s".into()), text);
        assert_eq!(store("routing = \"prior:lambda=0.1\"\n[run]\ncache = \"3x\"").unwrap().len(), 2);
        for text in ["[run]\ntrace = \"/x\"", "[run]\ntelemetry = \"/x\"", "mlock = true", "evictor = \"/x\""] {
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
