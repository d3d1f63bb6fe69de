//! The file of the hot set: where it is written, what becomes of a damaged one, and what a chat reads of it.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use larder_store::HOT_EXPERTS;

use crate::support::{command, fixture, larder_ok};

/// A store and a cache folder of a user.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Place { dir: tempfile::tempdir().unwrap() };
        larder_ok(&["convert", fixture("golden/olmoe").to_str().unwrap(), place.store().to_str().unwrap()]);
        place
    }

    fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    fn beside(&self) -> PathBuf {
        self.store().join(HOT_EXPERTS)
    }

    fn cached(&self) -> PathBuf {
        self.dir.path().join("cache/larder").join(HOT_EXPERTS)
    }

    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = command();
        command.env("XDG_CACHE_HOME", self.dir.path().join("cache")).env("LARDER_HOT_SET", "auto").arg(name);
        command.arg("-m").arg(self.store()).args(["--cache", "3x", "--threads", "2", "-n", "12"]).args(flags);
        command
    }

    /// Runs a prompt and returns the words, and the lines about the hot set.
    fn run(&self, flags: &[&str]) -> (String, Vec<String>) {
        let output = self.command("run", &[&["-p", "How many", "--ignore-eos"], flags].concat()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let about = said.lines().filter(|line| line.contains("hot")).map(str::to_owned).collect();
        (String::from_utf8(output.stdout).unwrap(), about)
    }

    /// Files in the cache folder of hot sets.
    fn in_cache(&self) -> usize {
        fs::read_dir(self.cached()).map_or(0, Iterator::count)
    }
}

#[test]
fn a_run_keeps_it_beside_the_store_unless_it_is_off() {
    let place = Place::new();
    let (words, said) = place.run(&["-o", "hot-set=off"]);
    assert!(said.is_empty() && !place.beside().exists(), "{said:?}");
    assert_eq!(place.run(&["--routing", "prior:lambda=0"]), (words.clone(), vec![]));
    assert!(!place.beside().exists(), "the text would depend on it");
    assert_eq!(place.run(&[]), (words.clone(), vec![]));
    let first = fs::read(place.beside()).unwrap();
    assert_eq!(place.run(&[]), (words, vec![]));
    assert_eq!(fs::read(place.beside()).unwrap().len(), first.len());
    assert_eq!(place.in_cache(), 0);
    let names = fs::read_dir(place.store()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.contains("hot")).count(), 1, "no temporary file is left");
}

#[test]
fn a_damaged_foreign_or_huge_one_is_one_note_and_is_replaced() {
    let place = Place::new();
    let (words, _) = place.run(&[]);
    let whole = fs::read(place.beside()).unwrap();
    let mut other = whole.clone();
    other[20] ^= 1;
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    let cases = [
        (&b"a text"[..], "is not a hot set of this version"),
        (&other, "belongs to another store"),
        (&changed, "is damaged"),
        (&whole[..whole.len() - 1], "is damaged"),
        (&vec![0; 1 << 20], "cannot be read"),
        (b"", "is not a hot set of this version"),
    ];
    for (content, why) in cases {
        fs::write(place.beside(), content).unwrap();
        let (found, said) = place.run(&[]);
        assert_eq!(found, words);
        assert!(said.len() == 1 && said[0].contains(why) && said[0].contains("hot-experts"), "{why}: {said:?}");
        assert_eq!(place.run(&[]), (words.clone(), vec![]), "{why}: it was replaced");
    }
}

#[test]
fn where_the_store_cannot_be_written_to_it_is_in_the_cache_folder() {
    let place = Place::new();
    // A folder of that name cannot be replaced by a file, not even by root, who may write to read-only folders.
    fs::create_dir(place.beside()).unwrap();
    let (words, said) = place.run(&[]);
    assert_eq!((said.len(), place.in_cache()), (1, 1), "the folder is no hot set: {said:?}");
    assert_eq!(place.run(&[]), (words.clone(), vec![]), "the one in the cache folder is read");
    assert_eq!(place.in_cache(), 1);

    fs::remove_dir(place.beside()).unwrap();
    assert_eq!(place.run(&[]), (words.clone(), vec![]));
    assert!(place.beside().is_file() && place.in_cache() == 0, "there is one at a time");

    fs::remove_file(place.beside()).unwrap();
    fs::remove_dir(place.cached()).unwrap();
    fs::write(place.cached(), "in the way").unwrap();
    fs::create_dir(place.beside()).unwrap();
    let (found, said) = place.run(&[]);
    assert_eq!(found, words);
    assert!(said.last().unwrap().contains("-o hot-set=off"), "{said:?}");
}

/// A chat on a terminal, which types a message after a second, and the share of hits that it shows then.
fn chat(place: &Place) -> Option<(String, f64)> {
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("there is no `script`, so the chat has no terminal");
        return None;
    }
    let chat = place.command("chat", &["--no-history", "--no-footer"]);
    let quoted = |word: &std::ffi::OsStr| format!("'{}'", word.to_str().unwrap());
    let line: Vec<String> = std::iter::once(chat.get_program()).chain(chat.get_args()).map(quoted).collect();
    let mut child = Command::new("timeout")
        .args(["60", "script", "-qec", &line.join(" "), "/dev/null"])
        .envs(chat.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .env("TERM", "xterm")
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut keys, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut unread: Vec<u8> = Vec::new();
    // What the screen shows up to the end of `what`.
    let mut shown = |what: &str| loop {
        if let Some(at) = unread.windows(what.len()).position(|bytes| bytes == what.as_bytes()) {
            let rest = unread.split_off(at + what.len());
            return String::from_utf8_lossy(&std::mem::replace(&mut unread, rest)).into_owned();
        }
        let mut bytes = [0; 4096];
        let read = screen.read(&mut bytes).unwrap();
        assert!(read > 0, "{what} is not in {}", String::from_utf8_lossy(&unread));
        unread.extend(&bytes[..read]);
    };
    shown("> ");
    std::thread::sleep(Duration::from_secs(1));
    keys.write_all(b"hi\r").unwrap();
    let answer = shown("cut off at max-tokens]");
    shown("> ");
    keys.write_all(b"/stats\r").unwrap();
    let stats = shown("% cache hits");
    let share = stats.split(" % cache hits").next().unwrap().split_whitespace().last().unwrap().parse().unwrap();
    keys.write_all(b"/quit\r").unwrap();
    assert!(child.wait().unwrap().success());
    Some((answer, share))
}

#[test]
fn a_chat_reads_it_while_nothing_is_typed() {
    let place = Place::new();
    let (Some((answer, cold)), Some(again)) = (chat(&place), chat(&place)) else { return };
    assert!(Path::is_file(&place.beside()));
    assert_eq!(again.0, answer);
    assert!(again.1 > cold, "{} % hits after {cold} %", again.1);
    fs::remove_file(place.beside()).unwrap();
    assert_eq!(chat(&place), Some((answer, cold)), "deleted, it is as before");
}
