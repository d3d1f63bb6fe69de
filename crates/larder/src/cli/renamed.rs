//! Usage errors in a sentence with the new spelling where a flag of an earlier version was typed.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, CommandFactory, Error};
use larder_runtime::settings::{SettingRow, renamed};

use super::Cli;

/// Parses a command line; wrong usage is reported and ends the program.
pub fn parse(line: &[OsString]) -> ArgMatches {
    try_parse(line).unwrap_or_else(|error| error.exit())
}

/// Parses a command line.
pub fn try_parse(line: &[OsString]) -> Result<ArgMatches, Error> {
    Cli::command().try_get_matches_from(line).map_err(|error| match moved(&error, line) {
        Some(sentence) => Error::raw(ErrorKind::UnknownArgument, sentence + "\n"),
        None => error,
    })
}

/// The new spelling of a flag that is not known.
fn moved(error: &Error, line: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = flag.strip_prefix("--")?.split('=').next()?;
    let (was_switch, row) = match (renamed(name), SettingRow::named(name)) {
        (Some(row), _) => (row.was_switch(), None),
        (None, Some(row)) => (row.is_switch(), Some(row)),
        (None, None) => return None,
    };
    let command = command_of(line);
    let has = |flag: &str| command.get_arguments().any(|arg| arg.get_long() == Some(flag));
    let value = if was_switch { String::new() } else { value_of(name, line)? };
    let new = match (row, renamed(name)) {
        (Some(row), _) if super::engine::settings_of(&command).iter().any(|taken| taken.name == row.name) => {
            row.typed_with(&value)
        }
        (None, Some(moved)) => moved.typed_with(&value, has(moved.new)),
        _ => return None,
    };
    let old = if was_switch { format!("--{name}") } else { format!("--{name} {value}") };
    Some(format!("{old} is now {new}"))
}

/// The command that a line names.
fn command_of(line: &[OsString]) -> Command {
    let words = line.iter().skip(1).map_while(|word| word.to_str());
    words.fold(Cli::command(), |command, word| match command.find_subcommand(word) {
        Some(inner) => inner.clone(),
        None => command,
    })
}

/// The value of a flag as typed; `…` where none is.
fn value_of(name: &str, line: &[OsString]) -> Option<String> {
    let flag = format!("--{name}");
    let words: Vec<&str> = line.iter().filter_map(|word| word.to_str()).collect();
    let at = words.iter().position(|word| word.split('=').next() == Some(&flag))?;
    let value = words[at].split_once('=').map(|(_, value)| value).or(words.get(at + 1).copied());
    Some(value.unwrap_or("…").to_owned())
}

#[cfg(test)]
mod tests {
    use larder_runtime::settings::{RENAMED, SETTINGS};

    use super::*;

    fn said(words: &[&str]) -> (i32, String) {
        let line: Vec<OsString> = [&["larder"], words].concat().into_iter().map(OsString::from).collect();
        let error = try_parse(&line).unwrap_err();
        (error.exit_code(), error.to_string())
    }

    #[test]
    fn each_earlier_flag_says_what_it_is_now() {
        for row in RENAMED {
            let old = format!("--{}", row.old);
            let typed: Vec<&str> = if row.was_switch() { vec![&old] } else { vec![&old, "4"] };
            let wanted = match row.old {
                "cache-mem" => "--cache 4",
                "cache-experts" => "--cache 4x",
                "preload" => "--cache all",
                "cache-scope" => "-o scope=4",
                "cache-scratch" => "-o scratch=4",
                "vram-mem" => "--vram 4",
                "vram-experts" => "--vram 4x",
                "draft" => "--speculate auto+draft=4",
                "placement" if cfg!(feature = "edge") => "-o edge-placement=4",
                "placement" => "--edge-placement 4",
                "json-schema" => "--format json:4",
                "regex" => "--format regex:4",
                "grammar" => "--format grammar:4",
                "chunk" => "-o prefill-tokens=4",
                other => panic!("{other} has no row here"),
            };
            let (code, sentence) = said(&[&["run", "-p", "x"], &typed[..]].concat());
            assert_eq!((code, sentence), (2, format!("error: {} is now {wanted}\n", typed.join(" "))));
        }
    }

    #[test]
    fn a_flag_that_became_a_setting_says_how_it_is_set() {
        for row in SETTINGS.iter().filter(|row| !row.has_flag) {
            let old = format!("--{}={}", row.name, row.example);
            let (code, sentence) =
                said(&["run", "-p", "x", if row.is_switch() { &old[..2 + row.name.len()] } else { &old }]);
            let wanted = if row.is_switch() { row.name.to_owned() } else { format!("{}={}", row.name, row.example) };
            assert!(code == 2 && sentence.ends_with(&format!("is now -o {wanted}\n")), "{sentence}");
        }
    }

    #[test]
    fn a_command_with_a_flag_of_the_new_name_names_that() {
        assert_eq!(
            said(&["lab", "replay", "t", "--cache-scope", "global"]).1,
            "error: --cache-scope global is now --scope global\n"
        );
        assert_eq!(
            said(&["lab", "sweep", "t", "--cache-experts", "4,8"]).1,
            "error: --cache-experts 4,8 is now --cache 4x,8x\n"
        );
        assert!(said(&["run", "-p", "x", "--colour"]).1.contains("unexpected argument '--colour'"));
        assert!(said(&["tune", "x", "--hot-set", "off"]).1.contains("unexpected argument"));
    }
}
