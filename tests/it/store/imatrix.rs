//! `larder convert --imatrix`: matrices rounded by what their columns matter, as llama.cpp measured it.

use serde_json::Value;

use super::convert::{contents, convert, logits_with, text};
use crate::support::{fixture, larder_ok, larder_refuses};

const MODEL: &str = "fixtures/gguf/tiny-qwen3-next-f32.gguf";
const IMATRIX: &str = "fixtures/imatrix/tiny-qwen3-next.gguf";
const FORMATS: [&str; 4] = ["--experts", "q4_0", "--resident", "q5_0"];

#[test]
fn an_imatrix_of_llama_cpp_decides_how_matrices_are_rounded() {
    let dir = tempfile::tempdir().unwrap();
    let [store, again, plain] = ["store", "again", "plain"].map(|name| dir.path().join(name));
    let (model, imatrix) = (fixture(MODEL), fixture(IMATRIX));
    let flags = [&FORMATS[..], &["--imatrix", text(&imatrix), "--json"]].concat();
    let report = larder_ok(&[&["convert", text(&model), text(&store)], &flags[..]].concat());
    let report: Value = serde_json::from_str(&report).unwrap();
    // llama.cpp measures no embedding and no output head unless it is asked to.
    let notes = report["notes"].to_string();
    assert!(notes.contains("the importance matrix does not have lm_head.weight"), "{notes}");
    assert!(!notes.contains("experts") && !notes.contains("others"), "{notes}");
    larder_ok(&["verify", text(&store)]);
    let manifest: Value = serde_json::from_slice(&std::fs::read(store.join("larder.json")).unwrap()).unwrap();
    let record = &manifest["source"]["imatrix"];
    assert_eq!(record["texts"][0], "words.txt");
    assert_eq!(record["digest"].as_str().unwrap().len(), 32);
    convert(&model, &again, &flags);
    assert!(contents(&store) == contents(&again));
    convert(&model, &plain, &FORMATS);
    let (weighed, plain_files) = (contents(&store), contents(&plain));
    let (experts, others): (Vec<_>, Vec<_>) = weighed
        .iter()
        .map(|(name, bytes)| (name, plain_files[name] == *bytes))
        .partition(|(name, _)| name.starts_with("experts"));
    assert!(experts.iter().all(|(_, same)| !same) && others.iter().any(|(_, same)| !same));
    let resident = logits_with(&store, &dir.path().join("resident"), &["--cache=all"]);
    assert!(logits_with(&store, &dir.path().join("streamed"), &["--cache", "2x"]) == resident);
    assert!(logits_with(&plain, &dir.path().join("plain-logits"), &["--cache=all"]) != resident);
}

#[test]
fn an_imatrix_that_does_not_fit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [store, old, mirror] = ["store", "old.dat", "mirror"].map(|name| dir.path().join(name));
    let (model, imatrix) = (fixture(MODEL), fixture(IMATRIX));
    let refused = |model: &str, imatrix: &str, more: &[&str]| {
        larder_refuses(&[&["convert", model, text(&store), "--imatrix", imatrix], &FORMATS[..], more].concat())
    };
    std::fs::write(&old, [5, 0, 0, 0, 17, 0, 0, 0]).unwrap();
    for (model, imatrix, why) in [
        (text(&model), text(&old), "llama-imatrix --in-file OLD.dat"),
        (text(&model), text(&model), "is no importance matrix: it is of the type 'model'"),
        (text(&model), "absent.gguf", "absent.gguf"),
        (text(&fixture("golden/mixtral")), text(&imatrix), "the importance matrix is of another model"),
    ] {
        let said = refused(model, imatrix, &[]);
        assert!(said.contains(why), "{said}");
        assert!(!store.exists());
    }
    convert(&model, &store, &FORMATS);
    let said = refused(text(&model), text(&imatrix), &["--also", text(&mirror)]);
    assert!(said.contains("was made without this importance matrix"), "{said}");
}
