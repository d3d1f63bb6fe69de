//! `larder prove`: equal bits are shown, and other bits are found.

use std::path::Path;

use serde_json::Value;

use crate::support::checkpoint::{tensors, with_tensors};
use crate::support::{fixture, larder, larder_ok, larder_refuses};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The demo model.
fn demo() -> String {
    text(&fixture("../models/demo")).to_owned()
}

/// The cases of a proof of a model with these flags, and whether it succeeded.
fn cases(model: &str, flags: &[&str]) -> (Vec<Value>, bool) {
    let output = larder(&[&["prove", "-m", model, "-n", "8", "--json"][..], flags].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(printed["digest"].as_str().unwrap().len(), 32, "{printed}");
    let good = printed["identical"] == true;
    assert_eq!(output.status.code(), Some(if good { 0 } else { 1 }), "{said}");
    (printed["cases"].as_array().unwrap().clone(), good)
}

/// The outcome of the only case whose name contains this.
fn outcome<'c>(cases: &'c [Value], name: &str) -> &'c Value {
    let found: Vec<&Value> = cases.iter().filter(|case| case["name"].as_str().unwrap().contains(name)).collect();
    assert_eq!(found.len(), 1, "{name}: {cases:?}");
    &found[0]["outcome"]
}

#[test]
fn every_way_to_compute_the_demo_model_gives_the_same_bits() {
    let (found, good) = cases(&demo(), &[]);
    assert!(good, "{found:?}");
    for name in ["half of the prompt", "in a batch", "thread", "all experts in memory", "reader pread"] {
        assert_eq!(outcome(&found, name), "identical", "{found:?}");
    }
    for case in &found {
        let whole = case["outcome"] == "identical" && case["tokens"] == 16;
        assert!(whole || case["outcome"] == "left_out" && case["why"].is_string(), "{case}");
    }
    let readers = found.iter().filter(|case| case["name"].as_str().unwrap().contains("4 of 32 experts per layer"));
    assert_eq!(readers.count(), 3, "{found:?}");
}

#[test]
fn each_instruction_set_but_the_one_in_use_is_compared_or_said_to_be_missing() {
    let doctor: Value = serde_json::from_str(&larder_ok(&["doctor", "--json"])).unwrap();
    let kernels = doctor["findings"].as_array().unwrap().iter().find(|finding| finding["id"] == "kernels").unwrap();
    let (found, _) = cases(&demo(), &[]);
    for set in kernels["numbers"]["sets"].as_array().unwrap() {
        let name = format!("kernels {}", set["name"].as_str().unwrap());
        let of_set: Vec<&Value> = found.iter().filter(|case| case["name"] == name.as_str()).collect();
        match (set["unused"].as_str(), &of_set[..]) {
            (None, []) => {}
            (Some(why), [case]) if why.starts_with("this processor has no ") => assert_eq!(case["why"], why),
            (Some(_), [case]) => assert_eq!(case["outcome"], "identical", "{case}"),
            (_, cases) => panic!("{name}: {cases:?}"),
        }
    }
}

#[test]
fn the_first_line_the_cases_and_the_verdict_are_told() {
    let said = larder_ok(&["prove", "-m", &demo(), "-n", "2", "--threads", "2"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("first run: 2 threads with ") && lines[0].contains("2 tokens each"), "{said}");
    let threads = lines.iter().find(|line| line.starts_with("1 thread ")).unwrap_or_else(|| panic!("{said}"));
    assert!(threads.ends_with("  identical, 4 tokens"), "{said}");
    assert!(lines.last().unwrap().contains(" comparisons, every bit identical; "), "{said}");
}

#[test]
fn a_checkpoint_has_no_slots_and_that_is_told() {
    let (found, good) = cases(text(&fixture("golden/olmoe")), &[]);
    assert!(good, "{found:?}");
    assert_eq!(outcome(&found, "all experts in memory"), "left_out");
    assert_eq!(outcome(&found, "reader pread"), "left_out");
    assert_eq!(outcome(&found, "in a batch"), "identical");
}

/// Runs of one proof that really differ: a strategy replaces experts that are missing, and how many are differs.
#[test]
fn a_routing_that_changes_the_text_is_found() {
    let (found, good) = cases(&demo(), &["--cache", "8x", "--routing", "prior:lambda=0.8"]);
    assert!(!good, "{found:?}");
    let all = found.iter().find(|case| case["name"] == "all experts in memory").unwrap();
    let bits = all["difference"]["logit"]["bits"].as_array().unwrap_or_else(|| panic!("{all}"));
    assert!(all["outcome"] == "differs" && bits[0] != bits[1], "{all}");
    assert_eq!(outcome(&found, "reader pread"), "differs");
    let said = larder_refuses(&["prove", "-m", &demo(), "-n", "8", "--cache", "8x", "--routing", "prior:lambda=0.8"]);
    assert!(said.contains("found other bits; ") && said.contains("leave out --routing"), "{said}");
}

/// A store of the golden model, in whose experts this number of bits is flipped, with checksums of the bytes as they
/// are.
fn store_with_flipped_bits(bits: usize, dir: &Path) -> String {
    let (checkpoint, store) = (dir.join(format!("checkpoint{bits}")), dir.join(format!("store{bits}")));
    let mut all = tensors(&fixture("golden/olmoe"));
    let mut experts = all.iter_mut().filter(|tensor| tensor.name.contains("layers.0.mlp.experts.0.down_proj"));
    let expert = experts.next().expect("the first expert of the first layer");
    // The sign of a value that is not zero.
    let values = expert.values();
    let width = expert.data.len() / values.len();
    let at = values.iter().position(|value| *value != 0.0).expect("a weight");
    (0..bits).for_each(|_| expert.data[(at + 1) * width - 1] ^= 0x80);
    with_tensors(&fixture("golden/olmoe"), &checkpoint, &all, |_| {});
    larder_ok(&["convert", text(&checkpoint), text(&store)]);
    store.to_str().unwrap().to_owned()
}

#[test]
fn one_flipped_bit_in_one_expert_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved.safetensors");
    let [whole, flipped] = [0, 1].map(|bits| store_with_flipped_bits(bits, dir.path()));
    larder_ok(&["prove", "-m", &whole, "-n", "8", "--save", text(&saved)]);
    let against = ["--against", text(&saved)];
    let (found, good) = cases(&whole, &against);
    assert!(good && found.len() == 1 && found[0]["tokens"] == 16, "{found:?}");
    let (found, good) = cases(&flipped, &against);
    let bits = found[0]["difference"]["logit"]["bits"].as_array().unwrap_or_else(|| panic!("{found:?}"));
    assert!(!good && bits[0] != bits[1], "{found:?}");
    let said = larder_refuses(&["prove", "-m", &flipped, "--against", text(&saved)]);
    assert!(said.contains("1 of 1 comparisons found other bits; check the model with `larder verify`"), "{said}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("saved.safetensors");
    let model = fixture("golden/olmoe");
    larder_ok(&["prove", "-m", text(&model), "-n", "2", "--save", text(&saved)]);
    let refused = |model: &str| larder_refuses(&["prove", "-m", model, "--against", text(&saved)]);
    assert!(refused(&demo()).contains("saved.safetensors: is of a model with other tokens"));
    let whole = std::fs::read(&saved).unwrap();
    std::fs::write(&saved, &whole[..whole.len() - 1]).unwrap();
    assert!(refused(text(&model)).contains("saved.safetensors: is not a file of `larder prove --save`"));
    let most = usize::MAX.to_string();
    assert!(larder_refuses(&["prove", "-m", &demo(), "-n", &most]).contains("lower --tokens"));
    assert_eq!(larder(&["prove", "--device", "cuda"]).status.code(), Some(2), "it is for experts in main memory");
}
