//! `larder convert --mix`: formats by the names of matrices.

use larder_core::{LayerIdx, NumberFormat};
use larder_store::{ExpertSource, Store};
use serde_json::Value;

use super::convert::{convert, logits_with, text};
use crate::support::{fixture, larder_ok, larder_refuses};

#[test]
fn a_mix_is_stored_run_and_told() {
    let dir = tempfile::tempdir().unwrap();
    let [rules, store, plain] = ["rules", "store", "plain"].map(|name| dir.path().join(name));
    std::fs::write(&rules, "# more bits for the first layer\nlayers.0.experts.* q8_0\n*.q_proj.weight q8_0\n").unwrap();
    let golden = fixture("golden/mixtral");
    convert(&golden, &store, &["--experts", "q4_0", "--mix", text(&rules)]);
    convert(&golden, &plain, &["--experts", "q4_0"]);
    larder_ok(&["verify", text(&store)]);
    let opened = Store::open(&store).unwrap();
    let kind = |layer| opened.layout(LayerIdx(layer)).down.kind;
    assert_eq!((kind(0), kind(1)), (NumberFormat::Q8_0, NumberFormat::Q4_0));
    let manifest: Value = serde_json::from_slice(&std::fs::read(store.join("larder.json")).unwrap()).unwrap();
    assert_eq!(manifest["source"]["mix"][0], "layers.0.experts.* q8_0");
    let resident = logits_with(&store, &dir.path().join("resident"), &["--cache=all"]);
    assert!(logits_with(&store, &dir.path().join("streamed"), &["--cache", "2x"]) == resident);
    assert!(logits_with(&plain, &dir.path().join("plain-logits"), &["--cache=all"]) != resident);
}

#[test]
fn rules_that_cannot_be_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [rules, store] = ["rules", "store"].map(|name| dir.path().join(name));
    let refused =
        || larder_refuses(&["convert", text(&fixture("golden/mixtral")), text(&store), "--mix", text(&rules)]);
    assert!(refused().contains("there is no such file"));
    for (content, why) in [
        (&b"layers.0.* q8_0\n*.down q9"[..], "line 2: 'q9' is no number format; there are keep, f32"),
        (b"*.down", "line 1: '*.down' has no number format"),
        (b"", "it has no rule"),
        (b"\xff q8_0", "is not UTF-8 text"),
    ] {
        std::fs::write(&rules, content).unwrap();
        let said = refused();
        assert!(said.contains(why), "{said}");
        assert!(!store.exists());
    }
}
