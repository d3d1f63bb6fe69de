//! A draft model on the command line: the same text, its part of the memory plan, and what is refused.

use std::path::PathBuf;

use serde_json::Value;

use crate::support::{fixture, larder, larder_ok, larder_refuses};

fn path(name: &str) -> String {
    fixture(name).to_str().unwrap().to_owned()
}

fn demo() -> String {
    path("../models/demo")
}

fn run(flags: &[&str]) -> Value {
    let demo = demo();
    let prompt = ["run", "-m", &demo, "-p", "The old man looked at the door, and", "-n", "60", "--json"];
    serde_json::from_str(&larder_ok(&[&prompt[..], flags].concat())).unwrap()
}

#[test]
fn a_draft_model_leaves_the_text_the_same_and_is_in_the_plan() {
    let demo = demo();
    for sampling in [&["--temperature", "0"][..], &["--temperature", "0.8", "--repetition-penalty", "1.1"]] {
        let off = run(&[sampling, &["--speculate", "off"]].concat());
        for size in [&[][..], &["--cache", "6x"]] {
            let draft = run(&[sampling, size, &["--speculate", &format!("draft={demo}")]].concat());
            assert_eq!(draft["ids"], off["ids"], "{sampling:?} {size:?}");
            let of = |key: &str| draft["speculation"][key].as_u64().unwrap();
            assert!(of("accepted") > 3 && of("drafted") >= of("accepted"), "{}", draft["speculation"]);
            let part = &draft["plan"]["draft"];
            assert!(part["name"] == "demo" && part["bytes"].as_u64() > Some(20_000_000), "{part}");
            let (all, peak) = (&draft["plan"]["total_bytes"], &draft["peak_bytes"]);
            assert!(peak.as_u64() <= all.as_u64(), "{peak} of {all}");
            let auto = run(&[sampling, size, &["--speculate", &format!("auto+draft={demo}")]].concat());
            assert_eq!(auto["ids"], off["ids"], "{sampling:?} {size:?}");
        }
    }
    assert_eq!(run(&["--speculate", "lookup"])["plan"]["draft"], Value::Null);
}

#[test]
fn draft_tokens_that_a_grammar_forbids_are_not_computed() {
    let demo = demo();
    let plain = ["--temperature", "0", "--repetition-penalty", "1"];
    for (regex, forbidden) in [("[A-Z]{60}", true), ("[a-z ,.]{120}", false)] {
        let off = run(&[&plain[..], &["--format", &format!("regex:{regex}"), "--speculate", "off"]].concat());
        let draft =
            run(&[&plain[..], &["--format", &format!("regex:{regex}"), "--speculate", &format!("draft={demo}")]]
                .concat());
        assert_eq!(draft["ids"], off["ids"], "{regex}");
        let of = |key: &str| draft["speculation"][key].as_u64().unwrap();
        println!("{regex}: {}", draft["speculation"]);
        assert!(
            if forbidden { of("drafted") == of("accepted") } else { of("accepted") > 3 },
            "{}",
            draft["speculation"]
        );
    }
}

#[test]
fn a_plan_has_the_draft_model_as_a_run_has() {
    let demo = demo();
    let plan = |flags: &[&str]| -> Value {
        serde_json::from_str(&larder_ok(&[&["plan", "-m", &demo, "--json"], flags].concat())).unwrap()
    };
    let draft = plan(&["--speculate", &format!("auto+draft={demo}")]);
    assert_eq!(draft["draft"]["name"], "demo");
    let more = draft["total_bytes"].as_u64().unwrap() - plan(&[])["total_bytes"].as_u64().unwrap();
    assert!(more.abs_diff(draft["draft"]["bytes"].as_u64().unwrap()) < 1_000_000, "{more}: {draft}");
    assert_eq!(plan(&["--speculate", "off"])["draft"], Value::Null);
    let said = larder_refuses(&["plan", "-m", &demo, "--speculate", &format!("draft={}", path("golden/olmoe"))]);
    assert!(said.contains("cannot draft for demo: token"), "{said}");
}

#[test]
fn a_draft_model_is_locked_and_its_preload_names_it() {
    let demo = demo();
    let locked = |flags: &[&str]| {
        let base = ["run", "-m", &demo, "-p", "the", "-n", "2", "--cache", "4x", "-omlock"];
        let output = larder(&[&base[..], flags].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        let line = said.lines().find_map(|line| line.strip_prefix("locked: ")).unwrap_or_else(|| panic!("{said}"));
        let megabytes = line.strip_suffix(" MB of memory").and_then(|number| number.parse::<f64>().ok());
        (megabytes, said.lines().find(|line| line.starts_with("preload: ")).map(str::to_owned))
    };
    let (draft, preload) = locked(&["--speculate", &format!("draft={demo}")]);
    let (alone, none) = locked(&[]);
    assert!(preload.is_some_and(|line| line.starts_with("preload: draft model demo, ")) && none.is_none());
    match (draft, alone) {
        (Some(draft), Some(alone)) => assert!(draft > alone + 20.0, "{draft} and {alone} MB"),
        _ => println!("skipped: memory cannot be locked here"),
    }
}

#[test]
fn a_benchmark_counts_drafts() {
    let demo = demo();
    let flags =
        ["--speculate", &format!("draft={demo}"), "--first-token", "off", "-r", "1", "-p", "8", "-n", "24", "--json"];
    let report = larder_ok(&[&["bench", "-m", &demo][..], &flags].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    let drafts = &report["series"][0]["runs"][0]["speculation"];
    assert!(drafts["accepted"].as_u64() > Some(3), "{drafts}");
    assert_eq!(report["series"][0]["runs"][0]["decode"]["tokens"], 24);
}

#[test]
fn what_cannot_draft_is_refused_in_a_sentence() {
    let (demo, olmoe, recurrent) = (demo(), path("golden/olmoe"), path("golden/qwen3_next"));
    let refused = |model: &str, flags: &[&str]| {
        larder_refuses(&[&["run", "-m", model, "-p", "the", "-n", "4"][..], flags].concat())
    };
    let trace = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("never-written.trace");
    for (model, flags, why) in [
        (&demo, &["--speculate", &format!("draft={olmoe}")][..], "cannot draft for demo: token"),
        (&demo, &["--speculate", &format!("draft={recurrent}")], "qwen3_next has a recurrent state or an encoder"),
        (&recurrent, &["--speculate", &format!("draft={olmoe}")], "cannot drop rejected draft tokens"),
        (
            &demo,
            &["--speculate", &format!("draft={demo}"), "--routing", "prior:lambda=0.2", "--cache", "6x"],
            "rejected draft tokens",
        ),
        (
            &demo,
            &["--speculate", &format!("draft={demo}"), "--trace", trace.to_str().unwrap()],
            "rejected draft tokens",
        ),
        (&demo, &["--speculate", "draft=/nowhere"], "/nowhere"),
    ] {
        let said = refused(model, flags);
        assert!(said.contains(why) && said.trim().lines().count() == 1, "{flags:?}: {said}");
    }
    // Where speculation is automatic, it does without.
    let said = larder_ok(&[
        "run",
        "-m",
        &recurrent,
        "-p",
        "the",
        "-n",
        "4",
        "--speculate",
        &format!("auto+draft={olmoe}"),
        "--json",
    ]);
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["plan"]["draft"], &report["speculation"]["drafted"]), (&Value::Null, &0.into()));
}
