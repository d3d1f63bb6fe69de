//! A pipe in the place of each file that is read: an error within seconds, where opening it would block for ever.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{command, fixture};

/// What a command may take; nothing of it is computed.
const PATIENCE: Duration = Duration::from_secs(5);

fn demo() -> PathBuf {
    fixture("../models/demo").canonicalize().unwrap()
}

fn pipe(path: &Path) -> String {
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo starts");
    assert!(made.success());
    path.to_str().unwrap().to_owned()
}

/// A folder with links to everything in `from`, except for the file `replaced` (a path below it), which is a pipe.
fn copy_with_pipe(from: &Path, to: &Path, replaced: &str) {
    std::fs::create_dir_all(to).unwrap();
    let (first, rest) = replaced.split_once('/').map_or((replaced, None), |(first, rest)| (first, Some(rest)));
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap();
        match rest {
            _ if name != first => symlink(&entry, to.join(name)).unwrap(),
            Some(rest) => copy_with_pipe(&entry, &to.join(name), rest),
            None => {}
        }
    }
    if rest.is_none() {
        pipe(&to.join(first));
    }
}

/// Runs the command, which must say one sentence about the pipe and end in time.
fn refuses(args: &[&str]) {
    let started = Instant::now();
    let mut command = command();
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{args:?} still runs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(output.status.code() == Some(1) && errors.len() == 1, "{args:?}: {:?}: {said}", output.status);
    assert!(errors[0].contains("not a regular file"), "{args:?}: {}", errors[0]);
}

#[test]
fn pipes_in_a_store() {
    let run = ["-p", "The", "-n", "2", "--cache", "4x"];
    for (file, flags) in [
        ("larder.json", run.as_slice()),
        ("resident.safetensors", &run),
        ("tokenizer.json", &run),
        ("tokenizer_config.json", &run),
        ("generation_config.json", &run),
        ("chat_template.jinja", &run),
        ("evictor.safetensors", &["-p", "The", "-n", "2", "-o", "eviction=learned"]),
        ("quality.json", &["-p", "The", "-n", "2", "--routing", "prior:lambda=0.3,delta=calibrated"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        copy_with_pipe(&demo(), &store, file);
        let store = store.to_str().unwrap();
        refuses(&[&["run", "-m", store], flags].concat());
    }
}

#[test]
fn pipes_in_the_place_of_shards() {
    for reader in ["uring", "pread"] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        copy_with_pipe(&demo(), &store, "experts/L000/E000.safetensors");
        for expert in std::fs::read_dir(demo().join("experts/L000")).unwrap().map(|entry| entry.unwrap().file_name()) {
            let path = store.join("experts/L000").join(expert);
            if std::fs::remove_file(&path).is_ok() {
                pipe(&path);
            }
        }
        refuses(&[
            "run",
            "-m",
            store.to_str().unwrap(),
            "-p",
            "The",
            "-n",
            "2",
            "--cache",
            "4x",
            "-o",
            &format!("reader={reader}"),
        ]);
    }
}

#[test]
fn pipes_in_a_checkpoint() {
    for file in
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        copy_with_pipe(&fixture("golden/olmoe").canonicalize().unwrap(), &model, file);
        refuses(&["run", "-m", model.to_str().unwrap(), "-p", "The", "-n", "2"]);
        let store = dir.path().join("store");
        refuses(&["convert", model.to_str().unwrap(), store.to_str().unwrap()]);
    }
}

#[test]
fn pipes_named_on_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let named = |name: &str| pipe(&dir.path().join(name));
    let (one, gguf, csv) = (named("one"), named("model.gguf"), named("questions.csv"));
    let (one, demo) = (one.as_str(), demo());
    let demo = demo.to_str().unwrap();
    let out = dir.path().join("out");
    let out = out.to_str().unwrap();
    for args in [
        ["inspect", gguf.as_str()].as_slice(),
        &["tokenize", "-m", demo, "--messages", one],
        &["logits", "-m", demo, "--tokens", one, "--out", out],
        &["eval", "ppl", "-m", demo, one],
        &["eval", "mcq", "-m", demo, "--shots", "0", csv.as_str()],
        &["lab", "replay", one],
        &["lab", "sweep", one],
        &["lab", "import", csv.as_str(), "--out", out],
        &["edge", "plan", "--activations", one, "--", one],
        &["run", "-m", demo, "-p", "The", "-n", "2", "--edge", one],
        &["run", "-m", demo, "-p", "The", "-n", "2", "-o", "eviction=learned", "-o", &format!("evictor={one}")],
    ] {
        refuses(args);
    }
}
