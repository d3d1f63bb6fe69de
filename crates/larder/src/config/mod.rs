//! Settings from files and the environment, below the flags on the command line.
//!
//! They are added to the command line as flags, so that they follow the same rules.

mod keys;
mod layers;
mod show;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};

use keys::LeafCommand;
use layers::Entry;

use crate::models;

pub use show::run;

/// Adds the settings of files and environment to the command line; `matches` is the parsed command line.
pub fn apply(line: Vec<OsString>, matches: &ArgMatches) -> Result<Vec<OsString>> {
    let (path, matches) = innermost(matches);
    let leaves = LeafCommand::all();
    let Some(leaf) = leaves.iter().find(|leaf| leaf.path == path) else { return Ok(line) };
    let models = matches.try_get_raw("model").ok().flatten();
    let store = only(models).and_then(|model| models::store_of(&models::named(Path::new(model)).1));
    let entries = layers::read_all(&leaves, store.as_deref(), variable)?;
    let typed = |arg: &Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let typed: Vec<&Arg> = leaf.flags().filter(|arg| typed(arg)).collect();
    let chosen = effective(leaf, &typed, &entries)?;
    let added = chosen.iter().flat_map(|(_, entry)| flags(entry));
    let at = 1 + path.len();
    Ok(line[..at].iter().cloned().chain(added.map(OsString::from)).chain(line[at..].iter().cloned()).collect())
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

/// The effective entry of each flag: the one of highest precedence, unless the flag was typed or conflicts with a flag of
/// higher precedence.
fn effective<'a>(leaf: &'a LeafCommand, typed: &[&Arg], entries: &'a [Entry]) -> Result<Vec<(&'a Arg, &'a Entry)>> {
    let mut order: Vec<&Entry> =
        entries.iter().filter(|s| s.section.as_deref().is_none_or(|n| n == leaf.section())).collect();
    order.sort_by_key(|entry| std::cmp::Reverse(entry.rank()));
    let mut chosen: Vec<(&Arg, &Entry)> = Vec::new();
    for entry in order {
        let Some(arg) = leaf.flag(&entry.key) else { continue };
        let known = |other: &Arg| other.get_id() == arg.get_id();
        if typed.iter().any(|t| known(t) || leaf.excludes(t, arg)) || chosen.iter().any(|(c, _)| known(c)) {
            continue;
        }
        let rival = chosen.iter().find(|(other, rival)| leaf.excludes(other, arg) && !is_off(rival) && !is_off(entry));
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
            None => chosen.push((arg, entry)),
        }
    }
    Ok(chosen)
}

/// Whether the entry turns a flag off.
fn is_off(entry: &Entry) -> bool {
    entry.values == ["false"]
}

fn flags(entry: &Entry) -> Vec<String> {
    let leaves_out = is_off(entry);
    let switch = entry.values == ["true"];
    let one = |value: &String| if switch { format!("--{}", entry.key) } else { format!("--{}={value}", entry.key) };
    entry.values.iter().filter(|_| !leaves_out).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::layers::Origin;
    use super::*;

    fn entry(section: Option<&str>, key: &str, value: &str, origin: Origin) -> Entry {
        Entry { section: section.map(str::to_owned), key: key.into(), values: vec![value.into()], origin }
    }

    fn flags_of(typed: &[&str], entries: &[Entry]) -> Result<Vec<String>> {
        let leaves = LeafCommand::all();
        let leaf = leaves.iter().find(|leaf| leaf.path == ["run"]).unwrap();
        let typed: Vec<&Arg> = typed.iter().map(|key| leaf.flag(key).unwrap()).collect();
        let mut all: Vec<String> =
            effective(leaf, &typed, entries)?.iter().flat_map(|(_, entry)| flags(entry)).collect();
        all.sort();
        Ok(all)
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
        assert_eq!(flags_of(&[], &all).unwrap(), ["--seed=4"]);
        assert_eq!(flags_of(&[], &all[..4]).unwrap(), ["--seed=3"]);
        assert_eq!(flags_of(&[], &all[..3]).unwrap(), ["--seed=2"]);
        assert!(flags_of(&["seed"], &all).unwrap().is_empty());
    }

    #[test]
    fn a_key_for_all_commands_is_skipped_where_a_command_does_not_take_it() {
        let user = || Origin::User("u".into());
        let all = [
            entry(None, "routing", "prior:lambda=0.2", user()),
            entry(None, "cache-mem", "1G", user()),
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
            entry(None, "cache-mem", "1G", user()),
            entry(None, "preload", "true", user()),
            entry(None, "cache-experts", "3", Origin::Store("s".into())),
        ];
        assert_eq!(flags_of(&[], &all).unwrap(), ["--cache-experts=3"]);
        assert_eq!(flags_of(&["cache-experts"], &all[..1]).unwrap(), Vec::<String>::new());
        let error = flags_of(&[], &all[..2]).unwrap_err().to_string();
        assert!(error.contains("conflict"), "{error}");
        let off = entry(None, "preload", "false", Origin::Environment("E".into()));
        assert_eq!(flags_of(&[], &[all[0].clone(), all[1].clone(), off]).unwrap(), ["--cache-mem=1G"]);
    }
}
