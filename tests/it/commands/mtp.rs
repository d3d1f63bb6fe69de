//! Multi-token prediction on the command line: a conversion that keeps the layer, the same text, and what is refused.

use std::path::Path;

use serde_json::Value;

use crate::support::mtp::{folder, predict_often};
use crate::support::{fixture, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(model: &Path, flags: &[&str]) -> Value {
    let prompt = ["run", "-m", text(model), "-p", "How many loaves", "-n", "60", "--ignore-eos", "--json"];
    serde_json::from_str(&larder_ok(&[&prompt[..], flags].concat())).unwrap()
}

fn accepted(report: &Value) -> u64 {
    report["speculation"]["accepted"].as_u64().unwrap_or(0)
}

#[test]
fn the_layer_is_kept_when_it_is_asked_for_and_drafts() {
    let source = folder("deepseek_v3", predict_often);
    let stores = tempfile::tempdir().unwrap();
    let (plain, with) = (stores.path().join("plain"), stores.path().join("with"));
    larder_ok(&["convert", text(source.path()), text(&plain), "--experts", "q8_0"]);
    larder_ok(&["convert", text(source.path()), text(&with), "--experts", "q8_0", "--mtp"]);
    for sampling in [&["--temperature", "0"][..], &["--temperature", "0.8", "--seed", "3"]] {
        let off = run(&plain, &[sampling, &["--speculate", "off"]].concat());
        for size in [&[][..], &["--cache", "3x"], &["--cache=all"]] {
            let drafted = run(&with, &[sampling, size, &["--speculate", "mtp"]].concat());
            assert_eq!(drafted["ids"], off["ids"], "{sampling:?} {size:?}");
            assert!(accepted(&drafted) > 10, "{}", drafted["speculation"]);
            let (all, peak) = (&drafted["plan"]["total_bytes"], &drafted["peak_bytes"]);
            assert!(peak.as_u64() <= all.as_u64(), "{peak} of {all}");
            for how in ["auto", "off", "lookup"] {
                let other = run(&with, &[sampling, size, &["--speculate", how]].concat());
                assert_eq!(other["ids"], off["ids"], "{sampling:?} {size:?} {how}");
            }
        }
        let direct = run(source.path(), &[sampling, &["--speculate", "mtp"]].concat());
        assert!(accepted(&direct) > 10, "{}", direct["speculation"]);
        assert_eq!(direct["ids"], run(source.path(), sampling)["ids"]);
    }
    // The plan has the KV cache and the experts of the layer where it is used.
    let planned = |model: &Path, how: &str, part: &str| {
        let report = run(model, &["--speculate", how, "--cache", "3x"]);
        report["plan"][part].as_u64().expect("a number of bytes")
    };
    for part in ["context_bytes", "slot_bytes", "resident_bytes"] {
        let [off, used, left_out] =
            [(&with, "off"), (&with, "mtp"), (&plain, "off")].map(|(m, how)| planned(m, how, part));
        assert!(off == left_out && used > off, "{part}: {off}, {used}, {left_out}");
    }
    let whole: Value = serde_json::from_str(&larder_ok(&["inspect", text(&with), "--json"])).unwrap();
    assert_eq!(whole["geometry"]["layers"], 3, "{whole}");
    larder_ok(&["verify", text(&with)]);
}

#[test]
fn what_has_no_layer_is_refused_in_a_sentence() {
    let (source, golden, dir) = (folder("glm4_moe", |_| {}), fixture("golden/glm4_moe"), tempfile::tempdir().unwrap());
    let stores = ["kept", "left-out", "without"].map(|name| dir.path().join(name));
    larder_ok(&["convert", text(source.path()), text(&stores[0]), "--mtp"]);
    larder_ok(&["convert", text(source.path()), text(&stores[1])]);
    larder_ok(&["convert", text(&golden), text(&stores[2])]);
    let refused = |model: &Path, flags: &[&str]| {
        larder_refuses(&[&["run", "-m", text(model), "-p", "the", "-n", "4", "--speculate", "mtp"][..], flags].concat())
    };
    let trace = dir.path().join("trace");
    for (model, flags, why) in [
        (
            &stores[1],
            &[][..],
            "without its layer for multi-token prediction, which --speculate mtp needs; convert it again",
        ),
        (
            &stores[2],
            &[],
            "has no layer for multi-token prediction, which --speculate mtp needs; if its source has one",
        ),
        (&golden, &[], "has no layer for multi-token prediction"),
        (&fixture("golden/olmoe"), &[], "has no layer for multi-token prediction"),
        (&stores[0], &["--routing", "prior:lambda=0.2", "--cache", "3x"], "rejected draft tokens would change"),
        (&stores[0], &["--trace", text(&trace)], "rejected draft tokens"),
        (&stores[0], &["-o", "eviction=learned", "--cache", "3x"], "with -o eviction=learned, whose weights"),
    ] {
        let said = refused(model, flags);
        assert!(said.contains(why), "{why}: {said}");
    }
    let again = larder_refuses(&["convert", text(source.path()), text(&stores[1]), "--mtp"]);
    assert!(again.contains("already holds a store"), "{again}");
    // Lossy routing and traces are as without the layer.
    let flags = ["--routing", "prior:lambda=0.2", "--cache", "3x"];
    assert_eq!(run(&stores[0], &flags)["ids"], run(&stores[1], &flags)["ids"]);
    let said = larder_refuses(&["convert", text(&fixture("golden/hy_v3")), text(&dir.path().join("x")), "--mtp"]);
    assert!(said.contains("has no layer for multi-token prediction"), "{said}");
}
