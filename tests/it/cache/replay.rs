//! `larder bench --trace`: the cache meets the experts of the trace.

use std::path::Path;

use serde_json::Value;

use crate::support::{fixture, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json(args: &[&[&str]]) -> Value {
    serde_json::from_str(&larder_ok(&args.concat())).unwrap()
}

#[test]
fn a_replayed_trace_has_the_misses_that_the_lab_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (store, trace) = (dir.path().join("store"), dir.path().join("trace.safetensors"));
    larder_ok(&["convert", text(&fixture("golden/olmoe")), text(&store)]);
    let synth = |shape: &[&str]| {
        let base = ["lab", "synth", "-o", text(&trace), "--force", "-n", "400", "--sequences", "1"];
        larder_ok(&[&base[..], shape].concat());
    };
    let bench = ["bench", "-m", text(&store), "-p", "1", "-n", "399", "-r", "1", "--first-token", "off"];
    let slots = ["--cache", "4x"];
    let replayed = ["--trace", text(&trace)];

    for (repeat, seed) in [("0", "1"), ("0.5", "2"), ("0.9", "3")] {
        synth(&["--layers", "2", "--experts", "6", "-k", "3", "--repeat", repeat, "--seed", seed]);
        let lab = json(&[&["lab", "replay", text(&trace), "--scope", "layer", "--json"], &slots]);
        let expected = lab["sequence_misses"][0].as_i64().unwrap();
        let found = json(&[&bench, &slots, &replayed, &["--json"]]);
        let cache = &found["series"][0]["runs"][0]["decode"]["cache"];
        let count = |key: &str| cache[key].as_i64().unwrap();
        assert_eq!(count("hits") + count("misses"), 399 * 2 * 3);
        // The prompt leaves four experts in each of two layers, and the last token of the trace is not decoded.
        assert!((count("misses") - expected).abs() <= 2 * (4 + 3), "{repeat}: {cache} and not {expected}");
    }

    synth(&["--layers", "3", "--experts", "6", "-k", "3"]);
    let said = larder_refuses(&[&bench[..], &slots, &replayed].concat());
    assert!(said.contains("has 3 of 6 experts per token in 3 layers, and the model 3 of 6 in 2"), "{said}");
    synth(&["--layers", "2", "--experts", "6", "-k", "3"]);
    let said = larder_refuses(&[&bench[..], &replayed, &["--cache=all"]].concat());
    assert!(said.contains("all experts are in memory; set --cache lower"), "{said}");
}
