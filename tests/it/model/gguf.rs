//! GGUF files against an independent forward pass over the very same blocks, and against the stores made of them.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use crate::support::{fixture, larder_ok};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixture("fixtures/gguf")).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    files.sort();
    assert!(files.len() >= 4);
    files
}

fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect()
}

fn ids(file: &SafeTensors) -> Vec<i32> {
    file.tensor("ids").unwrap().data().as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w)).collect()
}

/// Logits for the tokens of the file beside `gguf`, as bytes of a safetensors file.
fn logits(model: &Path, gguf: &Path, out: &Path) -> Vec<u8> {
    let expected = std::fs::read(gguf.with_extension("safetensors")).unwrap();
    let tokens = out.with_extension("json");
    let ids = ids(&SafeTensors::deserialize(&expected).unwrap());
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    larder_ok(&["logits", "-m", text(model), "--tokens", text(&tokens), "--out", text(out), "--force", "--exact"]);
    std::fs::read(out).unwrap()
}

#[test]
fn logits_match_an_independent_forward_pass() {
    for gguf in files() {
        let dir = tempfile::tempdir().unwrap();
        let got = logits(&gguf, &gguf, &dir.path().join("out"));
        let want = std::fs::read(gguf.with_extension("safetensors")).unwrap();
        let got = floats(&SafeTensors::deserialize(&got).unwrap(), "full_logits");
        let want = floats(&SafeTensors::deserialize(&want).unwrap(), "full_logits");
        assert_eq!(got.len(), want.len());
        let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-3, "{}: logits are {worst:e} off", gguf.display());
    }
}

#[test]
fn a_store_gives_the_bits_of_its_gguf() {
    for gguf in files() {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        larder_ok(&["convert", text(&gguf), text(&store)]);
        larder_ok(&["verify", text(&store)]);
        let direct = logits(&gguf, &gguf, &dir.path().join("direct"));
        assert_eq!(direct, logits(&store, &gguf, &dir.path().join("store-out")), "{}", gguf.display());
    }
}

#[test]
fn the_tokenizer_and_template_of_a_gguf_are_its_metadata() {
    let gguf = fixture("fixtures/gguf/tiny-olmoe-q4_0.gguf");
    let dir = tempfile::tempdir().unwrap();
    let messages = dir.path().join("messages.json");
    std::fs::write(&messages, r#"[{"role": "user", "content": "any text at all: 1+1=2 ñ 你"}]"#).unwrap();
    for flags in [vec!["--", "any text at all: 1+1=2 ñ 你"], vec!["--messages", text(&messages)]] {
        let out = larder_ok(&[&["tokenize", "-m", text(&gguf)][..], &flags].concat());
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert!(json["decoded"].as_str().unwrap().contains("any text at all: 1+1=2 ñ 你"), "{json}");
    }
}
