//! Kernels of an instruction set that is named.

use serde_json::Value;

use crate::support::{command, fixture, larder_ok};

/// What the demo model writes with these variables and flags: the exit code, the output and the messages.
fn written(variables: &[(&str, &str)], flags: &[&str]) -> (Option<i32>, String, String) {
    let demo = fixture("../models/demo");
    let args = ["run", "-m", demo.to_str().unwrap(), "-p", "It was", "-n", "32", "--temperature", "0", "--cache", "8x"];
    let output = command().envs(variables.iter().copied()).args(args).args(flags).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The instruction sets of this processor, as `larder doctor` names them.
fn sets() -> Vec<String> {
    let found: Value = serde_json::from_str(&larder_ok(&["doctor", "--json"])).unwrap();
    let kernels = found["findings"].as_array().unwrap().iter().find(|finding| finding["id"] == "kernels").unwrap();
    let is_here = |set: &&Value| !set["unused"].as_str().is_some_and(|why| why.starts_with("this processor has no "));
    let sets = kernels["numbers"]["sets"].as_array().unwrap().iter().filter(is_here);
    sets.map(|set| set["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_set_writes_the_same_words() {
    let (code, words, said) = written(&[], &[]);
    assert!(code == Some(0) && words.split_whitespace().count() > 10, "{words}{said}");
    let sets = sets();
    assert!(sets.iter().any(|set| set == "portable"), "{sets:?}");
    for set in &sets {
        let by_flag = written(&[("LARDER_KERNELS", "auto")], &["-o", &format!("kernels={set}")]);
        let by_variable = written(&[("LARDER_KERNELS", set)], &[]);
        assert_eq!([&by_flag.1, &by_variable.1], [&words; 2], "{set}: {}{}", by_flag.2, by_variable.2);
    }
}

#[test]
fn a_name_that_is_unknown_is_refused_by_every_command() {
    let demo = fixture("../models/demo");
    let inspect = command().env("LARDER_KERNELS", "mmx").args(["inspect", demo.to_str().unwrap()]).output().unwrap();
    let (code, _, of_run) = written(&[("LARDER_KERNELS", "mmx")], &[]);
    assert_eq!((code, inspect.status.code()), (Some(1), Some(1)));
    for said in [of_run, String::from_utf8(inspect.stderr).unwrap()] {
        let sentence = "error: LARDER_KERNELS: must be auto, or an instruction set that this processor has: ";
        assert!(said.starts_with(sentence) && said.ends_with("portable\n") && said.lines().count() == 1, "{said}");
    }
    let (code, _, said) = written(&[], &["-o", "kernels=mmx"]);
    assert!(code == Some(2) && said.contains("kernels: must be auto, or an instruction set"), "{said}");
}
