//! What the tests share.

pub mod checkpoint;
pub mod control_group;
pub mod gguf;
pub mod loop_drive;
pub mod mmproj;
pub mod mtp;
pub mod qwen3_vl_gguf;
pub mod reference;
pub mod report_page;
pub mod rig;
pub mod vision;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

pub use rustix::process::Signal;

/// A file or folder below `tests/`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The golden models without an encoder, one folder per `model_type`.
pub fn golden_models() -> Vec<PathBuf> {
    folders(&fixture("golden")).into_iter().filter(|folder| !has_encoder(folder)).collect()
}

/// The golden models with an encoder.
pub fn encoder_decoders() -> Vec<PathBuf> {
    folders(&fixture("golden")).into_iter().filter(|folder| has_encoder(folder)).collect()
}

/// Whether an encoder reads the prompt of the model in this folder.
pub fn has_encoder(folder: &Path) -> bool {
    config(folder)["is_encoder_decoder"] == true
}

/// The content of a `quality.json` for `golden/olmoe`, with numbers that no model has.
pub fn calibration_of_olmoe() -> serde_json::Value {
    let lambda = |lambda: f64, rise: f64| serde_json::json!({"lambda": lambda, "rise": rise, "rise_error": null, "agreement": 0.75, "kl": 0.5, "misses_per_token": 1.5});
    let setting = |price: f64, loss: f64, bytes: f64| serde_json::json!({"lambda": 0.0, "price": price, "loss": loss, "ratio": 1.0, "bytes": bytes, "milliseconds": 1.0});
    serde_json::json!({
        "model_type": "olmoe", "experts": 6, "text": "ids.json", "tokens": 24, "date": "2026-11-26", "larder": "0.2.0",
        "definition": larder_core::DEFINITION,
        "slots": 2, "eviction": "lru", "delta": [1.25, 3.5], "lambdas": [lambda(0.5, 0.4), lambda(5.0, 1.0)],
        "substituted": [0.5, 1.0], "left_out": [1.0, 2.0], "small": [], "small_share": 0.0,
        "settings": [setting(0.0, 0.0, 100.0), setting(0.1, 0.01, 60.0), setting(0.4, 0.03, 40.0)],
    })
}

fn config(folder: &Path) -> serde_json::Value {
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
    serde_json::from_str(&config).expect("JSON")
}

/// The folders in a folder, sorted.
pub fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut all: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    all.sort();
    all
}

/// Sends a signal to a process that a test has started.
pub fn signal(child: &Child, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal)
        .expect("the child is not yet reaped");
}

/// What `LARDER_UNDER_TEST` names, such as an emulator and a binary for another processor.
fn named() -> Option<Command> {
    let named = std::env::var("LARDER_UNDER_TEST").ok()?;
    let mut words = named.split_whitespace();
    let mut command = Command::new(words.next()?);
    command.args(words);
    Some(command)
}

/// Whether the command under test is a program for Windows, which runs here in Wine.
pub fn is_for_windows() -> bool {
    named().and_then(|command| Some(command.get_args().last()?.as_encoded_bytes().ends_with(b".exe"))) == Some(true)
}

/// What the command said, with the paths that it made in it as this system writes them.
pub fn with_slashes(said: &str) -> String {
    if is_for_windows() { said.replace('\\', "/") } else { said.to_owned() }
}

/// The command, of somebody who has configured nothing: the one that was built with the tests, unless another is named.
pub fn command() -> Command {
    let mut command = named().unwrap_or_else(|| Command::new(env!("CARGO_BIN_EXE_larder-under-test")));
    for name in ["XDG_CONFIG_HOME", "XDG_STATE_HOME"] {
        command.env(name, fixture("nobody"));
    }
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    // Stores of several tests stay as they are.
    command.env("LARDER_HOT_SET", "off");
    command
}

/// Runs the command.
pub fn larder<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Output {
    command().args(args).output().expect("the command starts")
}

/// Runs the command, which must succeed, and returns what it printed.
pub fn larder_ok<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> String {
    let output = larder(args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {:?}\n{said}", output.status, args.iter().map(S::as_ref).collect::<Vec<_>>());
    String::from_utf8(output.stdout).expect("output is text")
}

/// Runs the command, which must fail with exit code 1 and one sentence, and returns the sentence.
pub fn larder_refuses<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> String {
    let output = larder(args);
    let said = String::from_utf8(output.stderr).expect("messages are text");
    assert_eq!(output.status.code(), Some(1), "{said}");
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(!said.contains("panicked"), "{said}");
    errors[0].to_owned()
}
