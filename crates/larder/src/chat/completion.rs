//! Tab completion of commands, settings and file names.

use std::fs;
use std::path::{MAIN_SEPARATOR, Path, is_separator};

use rustyline::completion::{Completer, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};

use super::command::{ArgumentKind, COMMANDS, CommandRow, split_setting};
use super::settings;

/// Most entries of a folder that are looked at for a file name.
const ENTRIES_MAX: usize = 10_000;

/// Completes the line before the cursor.
pub struct ChatCompleter;

impl Completer for ChatCompleter {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, _: &Context) -> rustyline::Result<(usize, Vec<Pair>)> {
        Ok(complete(&line[..pos]))
    }
}

impl Hinter for ChatCompleter {
    type Hint = String;
}

impl Highlighter for ChatCompleter {}
impl Validator for ChatCompleter {}
impl Helper for ChatCompleter {}

/// Where the completed word begins, and what may stand there.
fn complete(line: &str) -> (usize, Vec<Pair>) {
    let Some(command) = line.strip_prefix('/') else { return (line.len(), vec![]) };
    let Some((name, rest)) = command.split_once(char::is_whitespace) else {
        let names = COMMANDS.iter().flat_map(|row| row.names.iter().map(move |name| (row, *name)));
        let space = |row: &CommandRow| if row.argument == ArgumentKind::None { "" } else { " " };
        return (1, names.filter_map(|(row, name)| candidate(command, name, space(row))).collect());
    };
    let rest = rest.trim_start();
    let at = line.len() - rest.len();
    match CommandRow::find(name).map(|row| row.argument) {
        Some(ArgumentKind::File) => (at, file_names(rest)),
        Some(ArgumentKind::Setting) => {
            let Some((name, value)) = split_setting(rest) else {
                return (at, settings::names().filter_map(|name| candidate(rest, name, " ")).collect());
            };
            let value = value.trim_start();
            let values = settings::values(name).into_iter().filter_map(|known| candidate(value, &known, ""));
            (line.len() - value.len(), values.collect())
        }
        Some(ArgumentKind::None | ArgumentKind::Text) | None => (line.len(), vec![]),
    }
}

fn candidate(typed: &str, word: &str, end: &str) -> Option<Pair> {
    word.starts_with(typed).then(|| Pair { display: word.to_owned(), replacement: format!("{word}{end}") })
}

/// The files and folders whose paths begin with `typed`. Paths are not quoted: a command takes the rest of its line as
/// one.
fn file_names(typed: &str) -> Vec<Pair> {
    let (folder, begun) = typed.rfind(is_separator).map_or(("", typed), |at| typed.split_at(at + 1));
    // Windows has two separators; the typed one is kept.
    let separator = folder.chars().last().unwrap_or(MAIN_SEPARATOR);
    let folder_path = if folder.is_empty() { Path::new(".") } else { Path::new(folder) };
    // A folder that cannot be read has no candidates.
    let entries = fs::read_dir(folder_path).into_iter().flatten().flatten().take(ENTRIES_MAX);
    let mut found: Vec<Pair> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let is_hidden = name.starts_with('.') && !begun.starts_with('.');
            if is_hidden || !name.starts_with(begun) || name.contains(char::is_control) {
                return None;
            }
            let end = if entry.path().is_dir() { separator.to_string() } else { String::new() };
            Some(Pair { replacement: format!("{folder}{name}{end}"), display: name + &end })
        })
        .collect();
    found.sort_by(|a, b| a.display.cmp(&b.display));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line that each candidate makes of `line`.
    fn lines(line: &str) -> Vec<String> {
        let (at, found) = complete(line);
        found.into_iter().map(|pair| format!("{}{}", &line[..at], pair.replacement)).collect()
    }

    #[test]
    fn commands_are_completed() {
        assert_eq!(lines("/re"), ["/reset", "/regen"]);
        assert_eq!(lines("/sa"), ["/save ", "/save! "]);
        assert_eq!(lines("/ex"), ["/exit"]);
        assert_eq!(lines("/").len(), COMMANDS.iter().map(|row| row.names.len()).sum::<usize>());
        for none in ["", "Hello", "/fly a", "/quit ", "/system on", " /re"] {
            assert!(lines(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn settings_and_their_values_are_completed() {
        assert_eq!(lines("/set te"), ["/set temperature "]);
        assert_eq!(lines("/set la"), ["/set lambda "]);
        assert_eq!(lines("/set  context-full  sh"), ["/set  context-full  shift"]);
        assert_eq!(lines("/set footer=o"), ["/set footer=on", "/set footer=off"]);
        assert_eq!(lines("/set routing o"), ["/set routing original"]);
        assert_eq!(lines("/set routing pri"), ["/set routing prior:lambda="]);
        let evictions = lines("/set eviction ");
        assert!(evictions.iter().any(|line| line == "/set eviction lru"), "{evictions:?}");
        assert!(!evictions.iter().any(|line| line.ends_with("belady")), "{evictions:?}");
        assert!(lines("/set temperature ").is_empty() && lines("/set colour r").is_empty());
    }

    #[test]
    fn file_names_are_completed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("talks")).unwrap();
        for name in ["talk one.json", ".hidden", "talks/a.json", "other"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let folder = dir.path().display();
        for command in ["save", "save!", "load"] {
            let both = [format!("/{command} {folder}/talk one.json"), format!("/{command} {folder}/talks/")];
            assert_eq!(lines(&format!("/{command} {folder}/ta")), both);
        }
        assert_eq!(lines(&format!("/load {folder}/talk one")), [format!("/load {folder}/talk one.json")]);
        assert_eq!(lines(&format!("/load {folder}/talks/")), [format!("/load {folder}/talks/a.json")]);
        assert_eq!(lines(&format!("/load {folder}/.h")), [format!("/load {folder}/.hidden")]);
        assert_eq!(lines(&format!("/load {folder}/")).len(), 3);
        assert!(lines(&format!("/load {folder}/none/x")).is_empty());
    }
}
