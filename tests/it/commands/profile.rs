//! Timelines: `--profile`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::support::{fixture, larder, larder_refuses};

const TOKENS: usize = 12;

/// Runs the demo model with 8 of 32 experts in memory; the text and what was printed beside it.
fn run(flags: &[&str]) -> (String, String) {
    let demo = fixture("../models/demo");
    let count = TOKENS.to_string();
    let base = ["run", "-m", demo.to_str().unwrap(), "-p", "The old man", "-n", &count, "--cache", "8x"];
    let out = larder(&[&base[..], &["--temperature", "0", "--threads", "2"], flags].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
}

/// The events of a file, which may lack its end.
fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let whole = if text.trim_end().ends_with(']') { text } else { format!("{text}]") };
    serde_json::from_str(&whole).unwrap()
}

fn micros(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{event}"))
}

/// An event of a thread: name, start, end, layer.
type Spent<'a> = (&'a str, f64, f64, Option<u64>);

fn spent(events: &[Value]) -> BTreeMap<u64, Vec<Spent<'_>>> {
    let mut threads = BTreeMap::<u64, Vec<Spent>>::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (start, took) = (micros(event, "ts"), micros(event, "dur"));
        let entry = (event["name"].as_str().unwrap(), start, start + took, event["args"]["layer"].as_u64());
        threads.entry(event["tid"].as_u64().unwrap()).or_default().push(entry);
    }
    threads
}

#[test]
fn a_timeline_holds_steps_layers_products_reads_and_waits() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    let (plain, _) = run(&[]);
    let (text, printed) = run(&["--profile", path.to_str().unwrap()]);
    assert_eq!(text, plain);
    assert!(printed.contains("profile: written to"), "{printed}");
    let events = events(&path);

    let threads = spent(&events);
    let inside = |(_, a, b, _): &Spent, (_, c, d, _): &Spent| a >= c && *b <= d + 0.01;
    for all in threads.values() {
        for (i, one) in all.iter().enumerate() {
            let overlaps = |other: &&Spent| other.1 < one.2 - 0.01 && one.1 < other.2 - 0.01;
            let beside = all[..i].iter().filter(overlaps).find(|other| !inside(one, other) && !inside(other, one));
            assert!(beside.is_none(), "{one:?} overlaps {beside:?}");
        }
    }
    let main = threads.values().find(|all| all.iter().any(|e| e.0 == "step")).expect("a thread with steps");
    let named = |name: &'static str| main.iter().filter(move |event| event.0 == name);
    assert!(named("step").count() >= TOKENS);
    for step in named("step") {
        let layers: Vec<&Spent> = named("layer").filter(|layer| inside(layer, step)).collect();
        assert_eq!(layers.iter().map(|layer| layer.3.unwrap()).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
        let sum: f64 = layers.iter().map(|layer| layer.2 - layer.1).sum();
        assert!(sum <= step.2 - step.1 && sum > 0.3 * (step.2 - step.1), "layers take {sum} of {step:?}");
        for layer in layers {
            let of_layer = |event: &&Spent| event.0.starts_with("expert products") && inside(event, layer);
            assert!(main.iter().find(of_layer).is_some_and(|event| event.3 == layer.3), "{layer:?}");
        }
    }
    assert!(named("waiting for reads").count() > 0);

    let (mut open, mut reads, mut bytes) = (BTreeMap::new(), 0, 0);
    for event in events.iter().filter(|event| event["cat"] == "SSD") {
        let key = (event["name"].to_string(), event["id"].as_u64().unwrap());
        match event["ph"].as_str().unwrap() {
            "b" => {
                assert_eq!(open.insert(key, micros(event, "ts")), None, "{event}");
                reads += 1;
                bytes += event["args"]["bytes"].as_u64().unwrap();
            }
            _ => assert!(open.remove(&key).is_some_and(|begun| begun <= micros(event, "ts")), "{event}"),
        }
    }
    let last = events.iter().rfind(|event| event["ph"] == "C").expect("a counter");
    let misses = last["args"]["misses"].as_u64().unwrap();
    assert!(open.is_empty() && reads >= misses && misses > 0 && bytes > 0, "{open:?} of {reads}, {misses} misses");
    assert!(events.iter().any(|event| event["name"] == "thread_name" && event["args"]["name"] == "main"));
}

#[test]
fn a_timeline_is_bounded_and_the_text_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    let (plain, _) = run(&[]);
    let (text, printed) = run(&["--profile", path.to_str().unwrap(), "--profile-max", "64k"]);
    assert_eq!(text, plain);
    assert!(printed.contains("profile: ended early") && printed.contains("has reached its limit"), "{printed}");
    assert!(std::fs::metadata(&path).unwrap().len() < 160 << 10);
    assert!(events(&path).len() > 50);
}

#[test]
fn a_timeline_that_cannot_be_written_is_refused_before_the_model_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("none/profile.json");
    let refused = larder_refuses(&["run", "-p", "x", "--profile", nowhere.to_str().unwrap()]);
    assert!(refused.contains("create it first"), "{refused}");
    let refused = larder_refuses(&["run", "-p", "x", "--profile", "/dev/full"]);
    assert!(refused.contains("not a file"), "{refused}");
}
