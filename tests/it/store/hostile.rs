//! Files from strangers: each must be refused in one sentence, without a panic and within bounded memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use larder_store::{ReadAt, SafetensorsHeader};

use crate::support::fixture;

#[derive(serde::Deserialize)]
struct Expected {
    kind: String,
    reason: String,
}

fn cases(kind: &str) -> Vec<(PathBuf, Expected)> {
    let table = std::fs::read(fixture("hostile/expected.json")).unwrap();
    let table: BTreeMap<String, Expected> = serde_json::from_slice(&table).unwrap();
    let cases: Vec<_> = table
        .into_iter()
        .filter(|(name, _)| name.starts_with(kind))
        .map(|(name, expected)| (fixture("hostile").join(name), expected))
        .collect();
    assert!(cases.len() > 20, "{kind} has only {} cases", cases.len());
    cases
}

/// Runs the command with little memory, so that a size taken from a file on trust shows.
fn larder_in_small_memory(args: &[&str], path: &Path) -> Output {
    let larder = env!("CARGO_BIN_EXE_larder-under-test");
    let script = "ulimit -v 1500000; larder=$1; shift; exec \"$larder\" \"$@\"";
    Command::new("sh").args(["-c", script, "sh", larder]).args(args).arg(path).output().expect("sh starts")
}

/// The longest error that counts as a sentence: that of an unknown architecture lists all known ones.
const SENTENCE_BYTES: usize = 800;

fn check_models(kind: &str, command: &[&str]) {
    let mut wrong = Vec::new();
    for (path, expected) in cases(kind) {
        let output = larder_in_small_memory(command, &path);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let valid = expected.kind == "valid";
        // Bad values are found when they are loaded, after the plan.
        let reports =
            |line: &&str| ["note: ", "plan: ", "      prefill: "].iter().any(|report| line.starts_with(report));
        let errors: Vec<&str> = said.lines().filter(|line| !reports(line)).collect();
        let one_sentence = errors.len() == 1 && errors[0].starts_with("error: ") && errors[0].len() < SENTENCE_BYTES;
        let good = match valid {
            true => output.status.success(),
            false => output.status.code() == Some(1) && one_sentence,
        };
        println!("{}: {} -> {}", path.display(), expected.reason, said.trim_end());
        if !good {
            wrong.push(format!("{} ({}): {:?}: {said}", path.display(), expected.reason, output.status));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn checkpoints_are_refused_in_one_sentence() {
    let out = tempfile::tempdir().unwrap();
    let tokens = out.path().join("tokens.json");
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let (tokens, out) = (tokens.to_str().unwrap(), out.path().join("out"));
    check_models("checkpoint/", &["logits", "--tokens", tokens, "--out", out.to_str().unwrap(), "--force", "--model"]);
}

#[test]
fn gguf_files_are_refused_in_one_sentence() {
    check_models("gguf/", &["inspect"]);
}

#[test]
fn safetensors_headers_are_refused() {
    for (path, expected) in cases("safetensors/") {
        let read = ReadAt::open(&path).and_then(|file| SafetensorsHeader::read(&file).map(drop));
        assert_eq!(read.is_ok(), expected.kind == "valid", "{} ({}): {read:?}", path.display(), expected.reason);
    }
}
