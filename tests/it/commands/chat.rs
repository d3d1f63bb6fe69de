//! A conversation through pipes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Output, Stdio};

use crate::support::{Signal, command, fixture, larder_ok, signal};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn spawn(args: &[&str]) -> Child {
    let mut command = command();
    command.arg("chat").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the command starts")
}

pub fn chat(args: &[&str], typed: &str) -> Output {
    let mut child = spawn(args);
    child.stdin.take().unwrap().write_all(typed.as_bytes()).expect("it reads all");
    child.wait_with_output().expect("it ends")
}

pub fn answers(args: &[&str], typed: &str) -> (String, String) {
    let output = chat(args, typed);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    (String::from_utf8(output.stdout).unwrap(), said)
}

#[test]
fn the_first_answer_is_that_of_run() {
    for name in ["golden/olmoe", "golden/mixtral"] {
        let model = fixture(name);
        for flags in [&["-n", "12"][..], &["-n", "12", "--temperature", "0.9", "--seed", "3"]] {
            let run = larder_ok(&[&["run", "--chat", "-m", text(&model), "-p", "hi"][..], flags].concat());
            let (answer, _) = answers(&[&["-m", text(&model)], flags].concat(), "hi\n");
            assert_eq!(answer, run, "{name} {flags:?}");
        }
    }
}

/// What `/stats` shows of the last answer: tokens cached, prefilled and generated.
pub fn last_answer(said: &str) -> [usize; 3] {
    let line = said.lines().rfind(|line| line.starts_with("last answer")).unwrap_or_else(|| panic!("{said}"));
    let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().unwrap()
}

#[test]
fn only_new_tokens_are_read() {
    let model = fixture("golden/olmoe");
    let args = ["-m", text(&model), "-n", "8"];
    let (_, said) = answers(&args, "hi\n/stats\n");
    let [kept, read, written] = last_answer(&said);
    assert_eq!(kept, 0, "{said}");
    let (_, said) = answers(&args, "hi\nbye\n/stats\n");
    let [kept_then, read_then, _] = last_answer(&said);
    // All but the last token that was written, which nobody has read.
    assert_eq!(kept_then, read + written - 1, "{said}");
    assert!(read_then < read, "{said}");
    let (_, said) = answers(&args, "hi\n/reset\nhi\n/stats\n");
    let [kept_again, read_again, _] = last_answer(&said);
    assert_eq!(kept_again + read_again, read, "{said}");
}

#[test]
fn remembering_changes_no_answer() {
    let model = fixture("golden/olmoe");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let args = ["-m", text(&model), "-n", "3"];
    let (all, _) = answers(&args, &format!("hi\n/save {}\nbye\n", text(&file)));
    let (second, said) = answers(&args, &format!("/load {}\nbye\n/stats\n", text(&file)));
    assert_eq!(last_answer(&said)[0], 0, "{said}");
    assert!(all.ends_with(&second) && all.len() > second.len(), "{all:?} {second:?}");
}

#[test]
fn conversations_are_saved_and_loaded_whole_or_not_at_all() {
    let model = fixture("golden/olmoe");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let args = ["-m", text(&model), "-n", "3", "--system", "Be."];
    answers(&args, &format!("/set top-k 7\nhi\n/save {}\n", text(&file)));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let roles: Vec<_> = json["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!((roles, &json["settings"]["top-k"]), (vec!["system", "user", "assistant"], &"7".into()));

    let load = format!("/load {}\n/set\n/system\n", text(&file));
    let (_, said) = answers(&args[..4], &load);
    assert!(said.contains("2 messages") && said.contains("top-k               7") && said.contains("Be."), "{said}");
    let mut broken = json;
    broken["settings"]["top-p"] = "9".into();
    std::fs::write(&file, broken.to_string()).unwrap();
    let (_, said) = answers(&args[..4], &load);
    assert!(said.contains("talk.json") && said.contains("top-k               0"), "{said}");
    assert!(said.contains("there is no system message"), "{said}");
}

#[test]
fn a_file_is_replaced_only_on_demand() {
    let model = fixture("golden/olmoe");
    let dir = tempfile::tempdir().unwrap();
    let [file, other] = ["talk.json", "note.txt"].map(|name| dir.path().join(name));
    std::fs::write(&other, "my note").unwrap();
    let args = ["-m", text(&model), "-n", "3"];
    let saved = || std::fs::read_to_string(&file).unwrap();
    answers(&args, &format!("hi\n/save {}\n", text(&file)));
    let before = saved();
    let (_, said) = answers(&args, &format!("bye\n/save {0}\n/save! {1}\n/save {1}\n", text(&file), text(&other)));
    assert!(said.contains("exists and was not replaced; /save! "), "{said}");
    assert_eq!(said.matches("is not a saved chat; name another file").count(), 2, "{said}");
    assert_eq!((saved(), std::fs::read_to_string(&other).unwrap()), (before.clone(), "my note".into()));
    let (_, said) = answers(&args, &format!("bye\n/save! {}\n", text(&file)));
    assert!(said.contains("saved to") && saved().contains("bye") && saved() != before, "{said}");
}

#[test]
fn the_oldest_turns_are_forgotten_where_not_all_fit() {
    let model = fixture("golden/olmoe");
    let args = ["-m", text(&model), "-n", "8", "--context", "128", "--system", "Remember me"];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let (_, said) = answers(&args, &format!("{}/save {}\n", "some words to say\n".repeat(8), text(&file)));
    assert!(said.contains("the context of 128 tokens is full") && said.contains("dropped"), "{said}");
    let saved = std::fs::read_to_string(&file).unwrap();
    assert!(saved.contains("Remember me") && saved.matches("some words").count() < 8, "{saved}");

    let output = chat(&args, &format!("{}\n", "word and ".repeat(100)));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("this message has") && said.contains("--context"), "{said}");
}

#[test]
fn a_full_context_ends_the_chat_or_is_shifted_as_the_user_says() {
    let model = fixture("golden/olmoe");
    let args = ["-m", text(&model), "-n", "8", "--context", "128", "--system", "Remember me", "--context-full", "stop"];
    let talk = "some words to say\n".repeat(8);
    let output = chat(&args, &talk);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the conversation has") && said.contains("/set context-full drop-turns"), "{said}");
    let (_, said) = answers(&args, &format!("/set context-full drop-turns\n{talk}"));
    assert!(said.contains("dropped from the prompt"), "{said}");

    let long = ["-m", text(&model), "-n", "300", "--context", "128", "--system", "Remember me", "--context-full"];
    let (stopped, said) = answers(&[&long[..], &["drop-turns"]].concat(), "hi\n");
    assert!(said.contains("answer cut off: the context of 128 tokens is full"), "{said}");
    assert!(said.contains("context 128 of 128"), "{said}");
    let (shifted, said) = answers(&[&long[..], &["shift"]].concat(), "hi\nbye\n");
    assert!(
        said.contains("was full during the answer: older tokens dropped") && !said.contains("answer cut off: the"),
        "{said}"
    );
    assert!(shifted.starts_with(stopped.trim_end()) && shifted.len() > 2 * stopped.len(), "{stopped:?} {shifted:?}");
}

#[test]
fn a_model_without_a_template_writes_on() {
    let dir = tempfile::tempdir().unwrap();
    let golden = fixture("golden/olmoe");
    for entry in std::fs::read_dir(&golden).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let config = dir.path().join("tokenizer_config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("chat_template");
    std::fs::write(&config, json.to_string()).unwrap();
    let model = text(dir.path());
    let run = larder_ok(&["run", "-m", model, "-p", "the", "-n", "6"]);
    let (answer, said) = answers(&["-m", model, "-n", "6"], "the\nand\n/stats\n");
    assert!(answer.starts_with(run.trim_end_matches('\n')), "{answer:?} {run:?}");
    assert_eq!(said.matches("no chat template").count(), 1, "{said}");
    assert!(last_answer(&said)[0] > 0, "{said}");
}

#[test]
fn commands_are_answered_on_standard_error() {
    let model = fixture("golden/olmoe");
    let typed = "/fly\n/set colour red\n/set temperature 0.5\n/set lambda 0.3\n/set\n/clear\n/regen\n/help\n/exit\nnever read\n";
    let (answer, said) = answers(&["-m", text(&model)], typed);
    assert_eq!(answer, "");
    for part in [
        "no command /fly",
        "no setting colour",
        "temperature         0.5",
        "conversation cleared",
        "no message to answer",
        "/save! FILE",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // A checkpoint is read whole, so nothing can be chosen by what is in memory.
    assert!(said.contains("--routing prior:lambda=0.3,j=1") && said.contains("routing             original"), "{said}");
    assert!(!said.contains('\x1b') && !said.contains("panicked"), "{said}");
}

#[test]
fn routing_changes_while_a_store_streams() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&store)]);
    let (_, said) = answers(
        &["-m", text(&store), "-n", "8", "--cache", "4x"],
        "hi\n/set lambda 0.9\nhi\n/stats\n/set routing original\n/set\n",
    );
    assert_eq!(said.matches("[TTFT ").count(), 2, "{said}");
    let cost = said
        .lines()
        .filter(|line| line.starts_with("[prior:lambda=0.9,j=1: ") && line.contains("% of experts substituted"));
    assert_eq!(cost.count(), 1, "that of the second answer: {said}");
    assert!(said.lines().any(|line| line.starts_with("prior:lambda=0.9,j=1: ")), "{said}");
    assert!(said.contains("routing             original") && said.contains("cache hits"), "{said}");
}

#[test]
fn eviction_changes_and_the_text_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&store)]);
    let talk = |lines: &str| answers(&["-m", text(&store), "-n", "8", "--cache", "4x"], lines);
    let (usual, _) = talk("hi\nhi\nhi\n");
    let (changed, said) = talk("hi\n/set eviction lfu\nhi\n/set eviction random:seed=3\nhi\n/set\n");
    assert_eq!(changed, usual);
    assert!(said.contains("eviction            random:seed=3"), "{said}");
    // What cannot be had leaves all as it was.
    for bad in ["youngest", "belady", "learned"] {
        let (_, said) = answers(&["-m", text(&store), "--cache", "4x"], &format!("/set eviction {bad}\n/set\n"));
        assert!(said.contains("error: ") && said.contains("eviction            lru"), "{bad}: {said}");
    }
}

fn interrupt(child: &Child) {
    signal(child, Signal::INT);
}

/// A chat that has begun to answer, and its output.
fn answering() -> (Child, BufReader<std::process::ChildStdout>) {
    let model = fixture("golden/olmoe");
    let mut child = spawn(&["-m", text(&model), "--context", "4096"]);
    child.stdin.as_mut().unwrap().write_all(b"hi\n").unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    assert!(!out.fill_buf().unwrap().is_empty());
    (child, out)
}

#[test]
fn an_interrupt_stops_the_answer_and_not_the_program() {
    let (mut child, mut out) = answering();
    interrupt(&child);
    child.stdin.take().unwrap().write_all(b"/set max-tokens 2\nbye\n/stats\n").unwrap();
    let mut answers = String::new();
    out.read_to_string(&mut answers).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("[stopped]") && said.contains("max-tokens") && said.contains("answers      2"), "{said}");
}

#[test]
fn an_interrupt_where_nothing_is_written_ends_the_program() {
    let (mut child, mut out) = answering();
    interrupt(&child);
    // The answer is over when its last line is.
    let mut end = Vec::new();
    while end.last() != Some(&b'\n') || !stopped(&mut child) {
        let n = out.read_until(b'\n', &mut end).unwrap();
        if n == 0 {
            break;
        }
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Whether the chat has said on standard error that it stopped.
fn stopped(child: &mut Child) -> bool {
    let err = child.stderr.as_mut().unwrap();
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(b"[stopped]") {
        if err.read(&mut byte).unwrap() == 0 {
            return false;
        }
        seen.push(byte[0]);
    }
    true
}
