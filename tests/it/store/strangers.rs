//! What strangers' files and prompts may say, take and hold: names with escape sequences, tokenizers and templates that
//! a conversion must not copy, and prompts that no context holds.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{command, fixture, larder};

/// A name that clears the screen, colours and ends the line.
const NAME: &str = "\u{1b}[2J\u{1b}[31mred\nerror: \u{202e}backwards";

/// A small checkpoint, one file of which `change` has changed.
fn checkpoint(dir: &Path, file: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) -> PathBuf {
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    for name in
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        let bytes = std::fs::read(fixture("golden/olmoe").join(name)).unwrap();
        std::fs::write(model.join(name), if name == file { change(bytes) } else { bytes }).unwrap();
    }
    model
}

fn with_json(change: impl Fn(&mut Value)) -> impl Fn(Vec<u8>) -> Vec<u8> {
    move |bytes| {
        let mut json = serde_json::from_slice(&bytes).unwrap();
        change(&mut json);
        json.to_string().into_bytes()
    }
}

/// The only line of an error, which says nothing to a terminal.
fn said(output: &Output) -> String {
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said:?}");
    let line = said.trim_end_matches('\n');
    assert!(line.starts_with("error: ") && !line.contains(char::is_control) && !line.contains('\u{202e}'), "{line:?}");
    line.to_owned()
}

#[test]
fn names_in_errors_are_escaped() {
    let dir = tempfile::tempdir().unwrap();
    let index = checkpoint(dir.path(), "", |bytes| bytes);
    std::fs::remove_file(index.join("model.safetensors")).unwrap();
    let map = json!({"weight_map": {"model.norm.weight": NAME}});
    std::fs::write(index.join("model.safetensors.index.json"), map.to_string()).unwrap();
    let line = said(&larder(&[Path::new("inspect"), &index]));
    assert!(line.contains("\\u{1b}[2J") && line.contains("red\\nerror"), "{line}");

    let dir = tempfile::tempdir().unwrap();
    let config = checkpoint(dir.path(), "config.json", with_json(|json| json["model_type"] = NAME.into()));
    assert!(said(&larder(&[Path::new("inspect"), &config])).contains("backwards"));

    let dir = tempfile::tempdir().unwrap();
    let template = format!("{{{{ raise_exception({}) }}}}", json!(NAME));
    let change = with_json(move |json| json["chat_template"] = template.clone().into());
    let model = checkpoint(dir.path(), "tokenizer_config.json", change);
    let model = model.to_str().unwrap();
    assert!(said(&larder(&["run", "-m", model, "--chat", "-p", "Hi"])).contains("backwards"));

    let gguf = std::fs::read(fixture("fixtures/gguf/tiny-olmoe-q4_0.gguf")).unwrap();
    let (old, new): (&[u8], &[u8]) = (b"blk.0.attn_q.weight", b"\x1b[2J\x1b[31m\nerror: ab");
    let at = gguf.windows(old.len()).position(|bytes| bytes == old).expect("the file has this tensor");
    let file = dir.path().join("named.gguf");
    std::fs::write(&file, [&gguf[..at], new, &gguf[at + new.len()..]].concat()).unwrap();
    assert!(said(&larder(&[Path::new("inspect"), &file])).contains("\\u{1b}[2J"));

    let missing = dir.path().join(NAME);
    assert!(said(&larder(&[Path::new("inspect"), &missing])).contains("\\u{1b}"));
    let long = dir.path().join("x".repeat(250)).join("y".repeat(250)).join("z".repeat(250)).join("n".repeat(250));
    assert!(said(&larder(&[Path::new("verify"), &long])).len() < 1500);
}

#[test]
fn a_conversion_refuses_what_a_run_refuses() {
    let growing = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(50)});
    let growing = json!({"type": "Sequence", "normalizers": [growing, growing]});
    let changes: [(&str, &str, Value); 5] = [
        ("tokenizer.json", "normalizer", growing),
        (
            "tokenizer.json",
            "pre_tokenizer",
            json!({"type": "Split", "pattern": {"Regex": "(a+)+(?!b)"},
            "behavior": "Isolated", "invert": false}),
        ),
        ("tokenizer_config.json", "chat_template", format!("{{{{ {}1 }}}}", "not ".repeat(20_000)).into()),
        ("tokenizer_config.json", "chat_template", "{% if %}".into()),
        ("generation_config.json", "temperature", "warm".into()),
    ];
    for (file, key, value) in changes {
        let dir = tempfile::tempdir().unwrap();
        let model = checkpoint(dir.path(), file, with_json(|json| json[key] = value.clone()));
        let (model, store) = (model.to_str().unwrap(), dir.path().join("store"));
        let run = said(&larder(&["run", "-m", model, "-p", "Hi"]));
        let convert = said(&larder(&["convert", model, store.to_str().unwrap()]));
        assert_eq!(run, convert);
        assert!(!store.exists(), "{file}: {key}");
    }
}

/// Runs the command with `text` again and again on standard input, until it stops reading.
fn with_endless_input(args: &[&str]) -> Output {
    let mut command = command();
    let mut child = command
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || while input.write_all(&[b'a'; 1 << 16]).is_ok() {});
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn endless_input_is_read_up_to_a_limit() {
    let demo = fixture("../models/demo");
    let demo = demo.to_str().unwrap();
    for args in [
        ["run", "-m", demo, "-p", "-"].as_slice(),
        &["tokenize", "-m", demo, "-"],
        &["tokenize", "-m", demo, "--messages", "-"],
        &["chat", "-m", demo],
    ] {
        let started = Instant::now();
        let output = with_endless_input(args);
        let said = String::from_utf8(output.stderr).unwrap();
        let error = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("{args:?}: {said}"));
        assert!(error.contains("longer than") || error.contains("at most"), "{args:?}: {error}");
        assert!(started.elapsed() < Duration::from_secs(30), "{args:?}: {:?}", started.elapsed());
    }
}

#[test]
fn a_prompt_that_no_context_holds_is_refused_before_it_is_tokenised() {
    let dir = tempfile::tempdir().unwrap();
    let model = checkpoint(dir.path(), "", |bytes| bytes);
    let prompt = "The old man ".repeat(9000);
    let started = Instant::now();
    let line = said(&larder(&["run", "-m", model.to_str().unwrap(), "-p", &prompt]));
    assert!(line.contains("tokens holds at most"), "{line}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
