//! Settings from files and the environment, below the flags on the command line.
//!
//! They are added to the command line, so that they follow the same rules.

mod keys;
mod layers;
mod show;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use larder_kernels::KernelChoice;

use keys::{ConfigKey, LeafCommand};
use layers::Entry;

use crate::cli::engine::given;
use crate::models;

pub use layers::MovedName;
pub use show::run;

/// The setting that chooses kernels.
const KERNELS: &str = "kernels";

/// Adds the settings of files and environment to the command line; `matches` is the parsed command line.
pub fn apply(line: Vec<OsString>, matches: &ArgMatches) -> Result<Vec<OsString>> {
    let (path, matches) = innermost(matches);
    let leaves = LeafCommand::all();
    let Some(leaf) = leaves.iter().find(|leaf| leaf.path == path) else { return Ok(line) };
    let models = matches.try_get_raw("model").ok().flatten();
    let store = only(models).and_then(|model| models::store_of(&models::named(Path::new(model)).1));
    let entries = layers::read_all(&leaves, store.as_deref(), variable)?;
    let chosen = effective(leaf, &typed(leaf, matches), &entries)?;
    let added = chosen.iter().flat_map(|(key, entry)| words(key, entry));
    let at = 1 + path.len();
    Ok(line[..at].iter().cloned().chain(added.map(OsString::from)).chain(line[at..].iter().cloned()).collect())
}

/// Chooses the kernels of this process before any are used: by the settings of the command, in which those of files and
/// of the environment are by now, or by the environment alone if it takes no settings.
pub fn choose_kernels(matches: &ArgMatches) -> Result<()> {
    let (_, matches) = innermost(matches);
    let typed = given(matches).filter(|given| given.row.name == KERNELS).last();
    let typed = typed.map(|given| (KERNELS.to_owned(), given.value.clone()));
    let of_environment = || {
        let name = layers::variable_of(KERNELS);
        variable(&name).filter(|value| !value.is_empty()).map(|value| (name, value))
    };
    let Some((name, value)) = typed.or_else(of_environment) else { return Ok(()) };
    value.parse().and_then(KernelChoice::apply).context(name)
}

/// What the command line itself says.
fn typed<'l>(leaf: &'l LeafCommand, matches: &ArgMatches) -> Vec<&'l ConfigKey> {
    let by_option: Vec<&str> = given(matches).map(|given| given.row.name).collect();
    let is_typed =
        |id: &str| matches.try_contains_id(id).is_ok() && matches.value_source(id) == Some(ValueSource::CommandLine);
    let said = |key: &&ConfigKey| match key {
        ConfigKey::Flag(flag) => is_typed(flag.get_id().as_str()),
        ConfigKey::Setting(row) => by_option.contains(&row.name) || is_typed(row.name),
    };
    leaf.keys.iter().filter(said).collect()
}

/// The only value: settings in a store are for its model alone.
fn only<'a>(values: Option<impl Iterator<Item = &'a OsStr>>) -> Option<&'a OsStr> {
    let mut values = values?;
    values.next().filter(|_| values.next().is_none())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The innermost subcommand with the names of its parents.
fn innermost(matches: &ArgMatches) -> (Vec<String>, &ArgMatches) {
    let (mut path, mut inner) = (Vec::new(), matches);
    while let Some((name, below)) = inner.subcommand() {
        path.push(name.to_owned());
        inner = below;
    }
    (path, inner)
}

/// The effective entry of each key: the one of highest precedence, unless the key was typed or conflicts with one of
/// higher precedence.
fn effective<'a>(
    leaf: &'a LeafCommand,
    typed: &[&ConfigKey],
    entries: &'a [Entry],
) -> Result<Vec<(&'a ConfigKey, &'a Entry)>> {
    let mut order: Vec<&Entry> =
        entries.iter().filter(|s| s.section.as_deref().is_none_or(|n| n == leaf.section())).collect();
    order.sort_by_key(|entry| std::cmp::Reverse(entry.rank()));
    let mut chosen: Vec<(&ConfigKey, &Entry)> = Vec::new();
    for entry in order {
        let Some(key) = leaf.key(&entry.key) else { continue };
        let known = |other: &ConfigKey| other.name() == key.name();
        if typed.iter().any(|t| known(t) || leaf.excludes(t, key)) || chosen.iter().any(|(c, _)| known(c)) {
            continue;
        }
        let rival = chosen.iter().find(|(other, rival)| leaf.excludes(other, key) && !is_off(rival) && !is_off(entry));
        match rival {
            Some((_, rival)) if rival.rank() == entry.rank() => {
                bail!(
                    "{}: {} and {} conflict; set only one of them",
                    show::origin_name(&entry.origin),
                    entry.key,
                    rival.key
                )
            }
            Some(_) => {}
            None => chosen.push((key, entry)),
        }
    }
    Ok(chosen)
}

/// Whether the entry turns a switch off.
fn is_off(entry: &Entry) -> bool {
    entry.values == ["false"]
}

/// An entry as it is typed; a flag that is off is not typed.
fn words(key: &ConfigKey, entry: &Entry) -> Vec<String> {
    let leaves_out = is_off(entry) && matches!(key, ConfigKey::Flag(_));
    entry.values.iter().filter(|_| !leaves_out).flat_map(|value| key.typed(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::layers::Origin;
    use super::*;

    fn entry(section: Option<&str>, key: &str, value: &str, origin: Origin) -> Entry {
        Entry { section: section.map(str::to_owned), key: key.into(), values: vec![value.into()], origin }
    }

    fn words_of(typed: &[&str], entries: &[Entry]) -> Result<String> {
        let leaves = LeafCommand::all();
        let leaf = leaves.iter().find(|leaf| leaf.path == ["run"]).unwrap();
        let typed: Vec<&ConfigKey> = typed.iter().map(|name| leaf.key(name).unwrap()).collect();
        let chosen = effective(leaf, &typed, entries)?;
        Ok(chosen.iter().flat_map(|(key, entry)| words(key, entry)).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn precedence_is_user_store_environment_command_line() {
        let (user, store) = (|| Origin::User("u".into()), || Origin::Store("s".into()));
        let env = || Origin::Environment("E".into());
        let all = [
            entry(None, "seed", "1", user()),
            entry(Some("run"), "seed", "2", user()),
            entry(Some("chat"), "seed", "9", user()),
            entry(None, "seed", "3", store()),
            entry(None, "seed", "4", env()),
        ];
        assert_eq!(words_of(&[], &all).unwrap(), "--seed=4");
        assert_eq!(words_of(&[], &all[..4]).unwrap(), "--seed=3");
        assert_eq!(words_of(&[], &all[..3]).unwrap(), "--seed=2");
        assert_eq!(words_of(&["seed"], &all).unwrap(), "");
        let settings = [entry(None, "cache", "1G", user()), entry(None, "pin", "false", store())];
        assert_eq!(words_of(&[], &settings).unwrap(), "-o pin=false -o cache=1G");
        assert_eq!(words_of(&["cache"], &settings).unwrap(), "-o pin=false");
    }

    #[test]
    fn a_typed_setting_counts_whether_by_its_flag_or_by_name() {
        let leaves = LeafCommand::all();
        let leaf = leaves.iter().find(|leaf| leaf.path == ["run"]).unwrap();
        for line in [&["--cache", "2G"][..], &["-o", "cache=2G"]] {
            let line: Vec<OsString> =
                [&["larder", "run", "-p", "x"], line].concat().into_iter().map(Into::into).collect();
            let matches = crate::cli::renamed::try_parse(&line).unwrap();
            let names: Vec<&str> = typed(leaf, innermost(&matches).1).iter().map(|key| key.name()).collect();
            assert_eq!(names, ["cache"]);
        }
    }

    #[test]
    fn a_key_for_all_commands_is_skipped_where_a_command_does_not_take_it() {
        let user = || Origin::User("u".into());
        let all = [
            entry(None, "routing", "prior:lambda=0.2", user()),
            entry(None, "hot-set", "off", user()),
            entry(None, "threads", "2", user()),
        ];
        let leaves = LeafCommand::all();
        let leaf = leaves.iter().find(|leaf| leaf.path == ["report"]).unwrap();
        let chosen = effective(leaf, &[], &all).unwrap();
        assert_eq!(chosen.iter().map(|(_, entry)| entry.key.as_str()).collect::<Vec<_>>(), ["threads"]);
    }

    #[test]
    fn of_conflicting_entries_the_higher_precedence_wins() {
        let user = || Origin::User("u".into());
        let all = [
            entry(None, "routing", "prior:lambda=0.2", user()),
            entry(None, "quality", "fast", user()),
            entry(None, "quality", "light", Origin::Environment("E".into())),
        ];
        assert_eq!(words_of(&[], &all).unwrap(), "-o quality=light");
        assert_eq!(words_of(&["quality"], &all[..1]).unwrap(), "");
        let error = words_of(&[], &all[..2]).unwrap_err().to_string();
        assert!(
            error.contains("routing and quality conflict") || error.contains("quality and routing conflict"),
            "{error}"
        );
    }
}
