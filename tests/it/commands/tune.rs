//! Budgets of output loss: `larder tune` and `--quality`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::serve::api::Server;
use crate::support::report_page::check_frame;
use crate::support::{command, fixture, larder, larder_ok, larder_refuses};

/// The demo model, calibrated on a few tokens.
pub struct Tuned {
    _dir: tempfile::TempDir,
    pub store: PathBuf,
    page: String,
    said: String,
}

pub static TUNED: LazyLock<Tuned> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let (store, page) = (dir.path().join("store"), dir.path().join("tune.html"));
    copy_untuned(&store);
    let flags = ["--tokens", "400", "--chunk", "200", "--cache", "8x", "--html", path(&page)];
    let said = larder_ok(&[&["tune", path(&TEXT), "-m", path(&store)][..], &flags].concat());
    Tuned { page: fs::read_to_string(&page).unwrap(), said, store, _dir: dir }
});

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub static TEXT: LazyLock<PathBuf> = LazyLock::new(|| fixture("../models/demo/held-out.txt"));

/// The demo model without its calibration.
fn copy_untuned(to: &Path) {
    copy(&fixture("../models/demo"), to);
    ["quality.json", "quality.json.seal"].iter().for_each(|name| fs::remove_file(to.join(name)).unwrap());
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

fn written(flags: &[&str]) -> Value {
    let base = ["run", "-m", path(&TUNED.store), "-p", "The old man looked at the door, and", "-n", "200", "--json"];
    let greedy = ["--temperature", "0", "--repetition-penalty", "1", "--ignore-eos"];
    serde_json::from_str(&larder_ok(&[&base[..], &greedy, flags].concat())).unwrap()
}

#[test]
fn a_calibration_has_rising_settings_that_read_less() {
    let made: Value = serde_json::from_slice(&fs::read(TUNED.store.join("quality.json")).unwrap()).unwrap();
    let settings = made["settings"].as_array().unwrap();
    let numbers = |name: &str| settings.iter().map(|s| s[name].as_f64().unwrap()).collect::<Vec<_>>();
    assert!(settings.len() > 4 && numbers("loss").is_sorted() && numbers("price").is_sorted());
    assert_eq!((numbers("loss")[0], numbers("price")[0]), (0.0, 0.0));
    assert!(numbers("bytes").is_sorted_by(|a, b| a > b), "{:?}", numbers("bytes"));
    for losses in ["substituted", "left_out"] {
        assert!(made[losses].as_array().unwrap().iter().all(|loss| loss.as_f64().unwrap() > 0.0));
    }
    let count = |name: &str| made[name].as_array().unwrap().len();
    assert_eq!((count("delta"), count("lambdas")), (8, 6));
    check_frame(&TUNED.page, "larder tune");
    for words in ["--quality balanced (0.01)", "--quality off", "quality.json: "] {
        assert!(TUNED.said.contains(words), "{}", TUNED.said);
    }
}

#[test]
fn a_text_depends_on_the_budget_and_not_on_how_experts_are_read() {
    let eight = ["--cache", "8x"];
    let exact = written(&eight);
    assert_eq!(written(&[&eight[..], &["--quality", "off"]].concat())["ids"], exact["ids"]);
    // So little that nothing may be lost.
    let none = written(&[&eight[..], &["--quality", "0.000001"]].concat());
    assert!(none["routing"]["expected_loss"].as_f64().unwrap() < 1e-5, "{}", none["routing"]);
    // Another text follows, so that misses are compared on a given one.
    let base = ["eval", "ppl", path(&TEXT), "-m", path(&TUNED.store), "--tokens", "200", "--one-by-one", "--json"];
    let misses = |flags: &[&str]| {
        let found: Value = serde_json::from_str(&larder_ok(&[&base[..], &eight, flags].concat())).unwrap();
        found["cache"]["misses"].as_u64().unwrap()
    };
    let (all, fewer) = (misses(&[]), misses(&["--quality", "fast"]));
    assert!(fewer * 10 < all * 8, "{fewer} of {all}");
    let fast = written(&[&eight[..], &["--quality", "fast"]].concat());
    let routing = &fast["routing"];
    assert!(routing["expected_loss"].as_f64().unwrap() > 0.0 && routing["output"]["measured"].as_u64().unwrap() > 0);
    for how in [&["-o", "reader=pread"][..], &["-o", "prefetch=2"], &["--threads", "1"], &["--quality", "0.02"]] {
        let base: &[&str] = if how[0] == "--quality" { &[] } else { &["--quality", "fast"] };
        let again = written(&[&eight[..], base, how].concat());
        assert_eq!(
            (&again["ids"], &again["decode"]["cache"]["misses"]),
            (&fast["ids"], &fast["decode"]["cache"]["misses"]),
            "{how:?}"
        );
    }
    // Measuring each token teaches the dial more, so another text may follow. The mean of 200 tokens is uncertain by as
    // much as the budget.
    let measured = written(&[&eight[..], &["--quality", "fast", "-o", "measure-every=1"]].concat());
    let loss = measured["routing"]["output"]["kl"].as_f64().unwrap();
    assert!(loss > 0.0 && loss < 0.04, "{loss} on 200 tokens");
    let said =
        larder(&["run", "-m", path(&TUNED.store), "-p", "Once", "-n", "20", "--cache", "8x", "--quality", "light"]);
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("nats per token expected, 0.005 allowed]"), "{said}");
}

/// The dial learns of the same tokens whether or not all others are measured beside it.
#[test]
fn a_check_has_the_true_loss_beside_that_of_the_samples() {
    let base = ["tune", path(&TEXT), "-m", path(&TUNED.store), "--tokens", "600", "--chunk", "300"];
    let check = ["--cache", "8x", "--check", "--budgets", "0.02", "--json"];
    let found: Value = serde_json::from_str(&larder_ok(&[&base[..], &check].concat())).unwrap();
    let row = &found["budgets"][0];
    // One of each 128, and perhaps one of the last 86.
    assert_eq!(row["tokens"].as_u64(), Some(598));
    assert!((4..=5).contains(&row["sampled"].as_u64().unwrap()), "{row}");
    let (loss, low, high) = (&row["loss"], &row["interval"][0], &row["interval"][1]);
    let [loss, low, high] = [loss, low, high].map(|n| n.as_f64().unwrap());
    assert!(low <= loss && loss <= high && loss > 0.002 && loss < 0.04, "{row}");
    assert!(row["bytes_per_token"].as_f64().unwrap() > 0.0);
}

#[test]
fn what_a_budget_needs_is_said_in_one_sentence() {
    let (demo, store) = (fixture("../models/demo"), &TUNED.store);
    let run = |model: &Path, flags: &[&str]| {
        let base = ["run", "-m", path(model), "-p", "a", "-n", "2"];
        [&base[..], flags].concat().iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let golden = fixture("golden/olmoe");
    let none = tempfile::tempdir().unwrap();
    let other = none.path().join("store");
    larder_ok(&["convert", path(&golden), path(&other)]);
    let said = larder_refuses(&run(&other, &["--cache", "2x", "--quality", "fast"]));
    assert!(said.contains("has no quality.json") && said.contains("larder tune"), "{said}");
    // Where all experts have a slot, nothing is missing.
    larder_ok(&run(store, &["--quality", "fast"]));
    larder_ok(&run(store, &["--quality", "fast", "--cache=all"]));
    for flags in [&["--quality", "much"][..], &["--quality", "0"], &["--quality", "fast", "--routing", "original"]] {
        assert_eq!(larder(&run(&demo, flags)).status.code(), Some(2), "{flags:?}");
    }
    let tune =
        |flags: &[&'static str]| [&["tune", path(&TEXT), "-m", path(store), "--tokens", "100"][..], flags].concat();
    assert!(larder_refuses(&tune(&["--cache", "8x"])).contains("add --force"));
    assert!(larder_refuses(&tune(&["--force"])).contains("set --cache lower than 32x"));
    assert!(larder_refuses(&["tune", path(&TEXT), "-m", path(&golden)]).contains("is not a store"));
    let damaged = none.path().join("damaged");
    copy(store, &damaged);
    fs::write(damaged.join("quality.json"), "{}").unwrap();
    let said = larder_refuses(&run(&damaged, &["--cache", "8x", "--quality", "fast"]));
    assert!(said.contains("larder tune"), "{said}");
}

/// The same calibration as without a stop, but for times.
#[test]
fn a_tune_that_was_killed_goes_on_from_where_it_was() {
    let whole: Value = serde_json::from_slice(&fs::read(TUNED.store.join("quality.json")).unwrap()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    copy_untuned(&store);
    let flags = ["--tokens", "400", "--chunk", "200", "--cache", "8x"];
    let args = [&["tune", path(&TEXT), "-m", path(&store)][..], &flags].concat();
    let part = store.join("quality.json.part");
    let mut child = command().args(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let runs = || {
        let kept: Option<Value> = fs::read(&part).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        kept.and_then(|kept| Some(kept["runs"].as_array()?.len())).unwrap_or_default()
    };
    let start = Instant::now();
    while runs() < 3 {
        assert!(start.elapsed() < Duration::from_secs(120) && child.try_wait().unwrap().is_none(), "no run was kept");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!store.join("quality.json").exists());
    let again = larder(&args);
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.success() && said.contains("passes of a tune that was stopped"), "{said}");
    assert!(!part.exists());
    let found: Value = serde_json::from_slice(&fs::read(store.join("quality.json")).unwrap()).unwrap();
    let near = |a: &Value, b: &Value| {
        let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
        assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a}, {b}");
    };
    let settings = |made: &Value| made["settings"].as_array().unwrap().clone();
    assert_eq!(settings(&found).len(), settings(&whole).len());
    for (a, b) in settings(&found).iter().zip(settings(&whole)) {
        ["lambda", "price", "loss", "ratio", "bytes"].iter().for_each(|name| near(&a[*name], &b[*name]));
    }
    for losses in ["substituted", "left_out", "delta"] {
        let (a, b) = (found[losses].as_array().unwrap(), whole[losses].as_array().unwrap());
        a.iter().zip(b).for_each(|(a, b)| near(a, b));
    }
    for (a, b) in found["lambdas"].as_array().unwrap().iter().zip(whole["lambdas"].as_array().unwrap()) {
        ["lambda", "rise", "rise_error", "agreement", "kl", "misses_per_token"]
            .iter()
            .for_each(|name| near(&a[*name], &b[*name]));
    }
}

#[test]
fn a_server_has_the_expected_loss_beside_its_budget() {
    let flags = ["--cache", "8x", "--context", "256", "--quality", "fast"];
    let server = Server::start(&TUNED.store, &flags);
    let answer = server.post("/v1/completions", json!({"prompt": "The old man", "max_tokens": 60, "ignore_eos": true}));
    assert_eq!((answer.status, server.metric("larder_output_kl_budget")), (200, 0.02));
    let expected = server.metric("larder_output_expected_kl");
    assert!(expected > 0.0 && expected < 0.04, "{expected}");
    let quality = &server.get("/engine").json()["quality"];
    assert_eq!(quality["budget"].as_f64(), Some(0.02));
    // The JSON parser of the tests may miss the last bit of a number.
    let shown = quality["expected_kl"].as_f64().expect("a number");
    assert!((shown - expected).abs() <= expected * f64::EPSILON, "{shown} and {expected}");
}
