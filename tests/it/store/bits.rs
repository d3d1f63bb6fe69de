//! `larder imatrix` and `larder convert --bits`: formats by what they cost.

use std::path::{Path, PathBuf};

use larder_core::LayerIdx;
use larder_store::{Importance, Manifest};
use serde_json::Value;

use super::convert::{convert, logits_with, text};
use crate::support::reference::Reference;
use crate::support::{fixture, larder, larder_ok, larder_refuses};

/// The tokens of a golden model's reference, over again, in a file.
fn ids(model: &Path, dir: &Path, times: usize) -> PathBuf {
    let path = dir.join(format!("ids-{times}.json"));
    let once = Reference::read(model).tokens("full_ids");
    std::fs::write(&path, serde_json::to_string(&once.repeat(times)).unwrap()).unwrap();
    path
}

fn report(source: &Path, store: &Path, flags: &[&str]) -> Value {
    serde_json::from_str(&larder_ok(&[&["convert", text(source), text(store), "--json"], flags].concat())).unwrap()
}

#[test]
fn an_importance_matrix_does_not_depend_on_the_form_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let [store, made, of_store] = ["store", "made.gguf", "of-store.gguf"].map(|name| dir.path().join(name));
    let golden = fixture("golden/mixtral");
    convert(&golden, &store, &[]);
    let ids = ids(&golden, dir.path(), 4);
    let measure = |model: &Path, out: &Path, chunk: &str| {
        larder_ok(&["imatrix", text(&ids), "-m", text(model), "-o", text(out), "--chunk", chunk, "--force"]);
    };
    measure(&golden, &made, "16");
    measure(&store, &of_store, "16");
    assert!(std::fs::read(&made).unwrap() == std::fs::read(&of_store).unwrap());

    let tokens = 4 * Reference::read(&golden).tokens("full_ids").len();
    let found = Importance::read(&made).unwrap();
    let (manifest, _) = Manifest::read(&store).unwrap();
    let geometry = &manifest.geometry;
    assert_eq!(found.chunks(), tokens.div_ceil(16));
    assert_eq!(found.shape("layers.1.experts.down"), Some((geometry.experts, geometry.inter)));
    assert_eq!(found.shape("model.layers.0.self_attn.q_proj.weight"), Some((1, geometry.hidden)));
    let squares = found.of("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert!(squares.iter().all(|square| *square > 0.0), "{squares:?}");
    // Gate and up have the same inputs, down has others.
    let of = |part| found.of_expert(LayerIdx(1), part, 0).unwrap();
    assert_eq!(of("gate"), of("up"));
    assert_ne!(of("gate"), of("down"));
    // Chunks of another length see other contexts.
    measure(&golden, &of_store, "8");
    assert_ne!(Importance::read(&of_store).unwrap().digest(), found.digest());
}

#[test]
fn bits_are_kept_to_and_spent_where_they_help() {
    let dir = tempfile::tempdir().unwrap();
    let golden = fixture("golden/mixtral");
    let (few, many) = (ids(&golden, dir.path(), 1), ids(&golden, dir.path(), 8));
    let store = |name: &str| dir.path().join(name);
    let imatrix = store("imatrix.gguf");
    larder_ok(&["imatrix", text(&many), "-m", text(&golden), "-o", text(&imatrix)]);
    let mut divergences = Vec::new();
    for bits in ["6", "6.6", "8"] {
        let made = report(&golden, &store(bits), &["--bits", bits, "--text", text(&many), "--imatrix", text(&imatrix)]);
        let formats = &made["formats"];
        let got = formats["bits"].as_f64().unwrap();
        assert!(got <= bits.parse().unwrap() && got > bits.parse::<f64>().unwrap() - 0.4, "{bits}: {formats}");
        divergences.push(formats["kl"].as_f64().unwrap());
        larder_ok(&["verify", text(&store(bits))]);
    }
    assert!(divergences.is_sorted_by(|a, b| a > b && *b > 0.0), "{divergences:?}");
    let resident = logits_with(&store("6.6"), &store("resident"), &["--cache=all"]);
    assert!(logits_with(&store("6.6"), &store("streamed"), &["--cache", "2x"]) == resident);

    // Resident weights may keep their format; then the experts alone have the bits.
    let made = report(&golden, &store("experts"), &["--bits", "5", "--text", text(&few), "--resident", "q8_0"]);
    let (manifest, _) = Manifest::read(&store("experts")).unwrap();
    assert_eq!(manifest.source.resident, "q8_0");
    assert!(made["formats"]["mix"].as_array().unwrap().iter().all(|rule| rule.as_str().unwrap().contains(".experts.")));
}

#[test]
fn a_search_goes_on_with_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let golden = fixture("golden/mixtral");
    let ids = ids(&golden, dir.path(), 2);
    let [store, costs] = ["store", "store.costs.jsonl"].map(|name| dir.path().join(name));
    let flags = ["--bits", "6.5", "--text", text(&ids)];
    let whole = report(&golden, &store, &flags)["formats"].clone();
    // As if it had been killed while it wrote the last line.
    let measured = std::fs::read_to_string(&costs).unwrap();
    std::fs::write(&costs, &measured[..measured.len() - 20]).unwrap();
    std::fs::remove_dir_all(&store).unwrap();
    assert_eq!(report(&golden, &store, &flags)["formats"], whole);
    assert_eq!(std::fs::read_to_string(&costs).unwrap(), measured);
    // A measurement of this text is found and used, which shows where the mix changes with it.
    let changed = measured.lines().enumerate().map(|(i, line)| match i {
        0 => line.to_owned(),
        _ => {
            let mut cost: Value = serde_json::from_str(line).unwrap();
            cost["kl"] = if i == 1 { 100.0.into() } else { 1e-9.into() };
            cost.to_string()
        }
    });
    std::fs::write(&costs, changed.collect::<Vec<_>>().join("\n") + "\n").unwrap();
    std::fs::remove_dir_all(&store).unwrap();
    assert_ne!(report(&golden, &store, &flags)["formats"]["mix"], whole["mix"]);
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let golden = fixture("golden/mixtral");
    let ids = ids(&golden, dir.path(), 1);
    let [store, other] = ["store", "other"].map(|name| dir.path().join(name));
    let refused = |source: &Path, bits: &str| {
        let said = larder_refuses(&["convert", text(source), text(&other), "--bits", bits, "--text", text(&ids)]);
        assert!(!other.exists());
        said
    };
    assert!(refused(&golden, "2").contains("have 5.93 bits per weight; choose at least as many"));
    convert(&golden, &store, &["--experts", "q4_0"]);
    assert!(refused(&store, "6").contains("is a store, and --bits needs a checkpoint or a .gguf file"));
    let other = text(&other);
    for flags in
        [&["--bits", "0.5", "--text", "x"][..], &["--bits", "5"], &["--bits", "5", "--text", "x", "--mix", "y"]]
    {
        let output = larder(&[&["convert", text(&golden), other], flags].concat());
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
    }
}
