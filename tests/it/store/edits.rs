//! Manifests and sidecars: accidental changes are refused, deliberate ones are made by a command.

use std::fs;
use std::path::{Path, PathBuf};

use larder_store::Store;
use serde_json::Value;

use super::convert::{contents, convert, logits_with, text};
use crate::support::{calibration_of_olmoe, fixture, larder, larder_ok, larder_refuses};

fn store(dir: &Path, model: &str) -> PathBuf {
    let store = dir.join(model);
    convert(&fixture("golden").join(model), &store, &[]);
    store
}

fn config(store: &Path) -> Value {
    Store::open(store).unwrap().manifest().config.clone()
}

/// Of the digits of a manifest without a checksum, one in fifteen changed the text when it was another, and nothing
/// noticed.
#[test]
fn no_byte_of_a_manifest_can_change_unnoticed() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path(), "olmoe");
    let path = store.join("larder.json");
    let good = fs::read(&path).unwrap();
    let changed = |at: usize, to: u8| {
        let mut bad = good.clone();
        bad[at] = to;
        fs::write(&path, bad).unwrap();
        Store::open(&store).is_err()
    };
    for (at, byte) in good.iter().enumerate() {
        // Another character of the same kind, so that the file stays as valid as it can.
        let other = match byte {
            b'9' => b'0',
            b'0'..=b'8' => byte + 1,
            b'a'..=b'y' | b'A'..=b'Y' => byte + 1,
            b' ' => b'\t',
            b'\n' => b' ',
            _ => byte ^ 1,
        };
        assert!(changed(at, other), "byte {at}, {:?}", char::from(*byte));
    }
    fs::write(&path, &good).unwrap();
    Store::open(&store).unwrap();
}

#[test]
fn a_key_of_the_config_is_changed_by_a_command() {
    let dir = tempfile::tempdir().unwrap();
    let (store, out) = (store(dir.path(), "olmoe"), dir.path().join("out"));
    let before = logits_with(&store, &out, &[]);
    let old = config(&store)["rope_theta"].clone();
    let said = larder_ok(&["store", "set", text(&store), "rope_theta=20000.0"]);
    assert_eq!(said.trim(), format!("rope_theta: {old} → 20000.0"));
    assert_eq!(config(&store)["rope_theta"], 20000.0);
    larder_ok(&["verify", text(&store)]);
    assert!(logits_with(&store, &out, &[]) != before);
    let back = format!("rope_theta={old}");
    let json: Value = serde_json::from_str(&larder_ok(&["store", "set", "--json", text(&store), &back])).unwrap();
    assert_eq!((&json[0]["key"], &json[0]["new"]), (&"rope_theta".into(), &old));
    assert!(logits_with(&store, &out, &[]) == before);
    // How many experts a token uses contradicts no tensor.
    let top_k = config(&store)["num_experts_per_tok"].as_u64().unwrap();
    larder_ok(&["store", "set", text(&store), &format!("num_experts_per_tok={}", top_k - 1)]);
    larder_ok(&["verify", text(&store)]);
    logits_with(&store, &out, &["--cache", "2x"]);
}

#[test]
fn a_change_that_contradicts_the_tensors_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path(), "olmoe");
    let before = contents(&store);
    for (change, reason) in [
        ("hidden_size=64", ""),
        ("num_experts=4", ""),
        ("num_hidden_layers=1", ""),
        ("vocab_size=7", ""),
        ("model_type=mixtral", ""),
        ("tie_word_embeddings=false", "has no tensor 'lm_head.weight'"),
        ("rope_theta=much", "is a number, but \"much\" is a text"),
        ("rope_theta.x=1", ""),
        ("no.such.key=1", "the config has no 'no'"),
    ] {
        let said = larder_refuses(&["store", "set", text(&store), change]);
        assert!(said.contains(reason), "{change}: {said}");
        assert!(contents(&store) == before, "{change}");
    }
    assert_eq!(larder(&["store", "set", text(&store), "rope_theta"]).status.code(), Some(2));
    assert_eq!(larder(&["store", "set", text(&store)]).status.code(), Some(2));
}

/// A calibration belongs to the store that it was measured on.
#[test]
fn a_calibration_of_another_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    convert(&fixture("golden/olmoe"), &one, &[]);
    convert(&fixture("golden/olmoe"), &two, &["--experts", "f16"]);
    let ids = ids(dir.path());
    let routed = |store: &Path| calibrated(&ids, store);
    fs::write(one.join("quality.json"), calibration_of_olmoe().to_string()).unwrap();
    assert!(larder_refuses(&routed(&one)).contains("has no seal; make it again with `larder tune`"));
    assert!(larder_ok(&["store", "seal", text(&one)]).contains("quality.json accepted"));
    larder_ok(&routed(&one));
    larder_ok(&["verify", text(&one)]);
    for name in ["quality.json", "quality.json.seal"] {
        fs::copy(one.join(name), two.join(name)).unwrap();
    }
    let said = larder_refuses(&routed(&two));
    assert!(said.contains("was made for another store") && said.contains("larder tune"), "{said}");
    larder_refuses(&["verify", text(&two)]);
    assert!(larder_ok(&["store", "seal", text(&two)]).contains("quality.json accepted"));
    larder_ok(&routed(&two));
    // A change of the config is another store.
    larder_ok(&["store", "set", text(&one), "rope_theta=20000.0"]);
    assert!(larder_refuses(&routed(&one)).contains("or before this one was changed"));
}

#[test]
fn a_changed_digit_of_a_calibration_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let (store, ids) = (store(dir.path(), "olmoe"), ids(dir.path()));
    let path = store.join("quality.json");
    let good = calibration_of_olmoe().to_string();
    fs::write(&path, &good).unwrap();
    larder_ok(&["store", "seal", text(&store)]);
    larder_ok(&calibrated(&ids, &store));
    let at = good.find('.').unwrap() + 1;
    let digit = good.as_bytes()[at];
    let other = char::from(if digit == b'9' { b'8' } else { digit + 1 });
    fs::write(&path, format!("{}{other}{}", &good[..at], &good[at + 1..])).unwrap();
    let said = larder_refuses(&calibrated(&ids, &store));
    assert!(said.contains("quality.json: does not match its checksum"), "{said}");
    let said = String::from_utf8(larder(&["verify", text(&store)]).stdout).unwrap();
    assert!(said.contains("quality.json: does not match its checksum"), "{said}");
}

fn ids(folder: &Path) -> PathBuf {
    let path = folder.join("ids.json");
    fs::write(&path, "[5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 90, 33]").unwrap();
    path
}

/// The arguments of a run that needs a calibration.
fn calibrated(ids: &Path, store: &Path) -> Vec<String> {
    let routing = ["--routing", "prior:lambda=0.5,delta=calibrated", "--cache", "2x"];
    let args = [&["eval", "ppl", text(ids), "-m", text(store), "--chunk", "12"][..], &routing].concat();
    args.into_iter().map(str::to_owned).collect()
}
