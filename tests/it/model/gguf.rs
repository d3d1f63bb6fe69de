//! GGUF files against an independent forward pass over the very same weights, and against the stores made of them.

use std::path::{Path, PathBuf};

use larder_core::{LayerIdx, NumberFormat};
use larder_store::{ExpertSource, Store};
use safetensors::SafeTensors;

use crate::support::{fixture, larder_ok};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixture("fixtures/gguf")).unwrap().map(|e| e.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    files.sort();
    assert!(files.len() >= 5);
    files
}

fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| f32::from_le_bytes(*w)).collect()
}

fn ids(file: &SafeTensors, name: &str) -> Vec<i32> {
    file.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w)).collect()
}

/// Logits for the tokens of the file beside `gguf`, as bytes of a safetensors file.
fn logits(model: &Path, gguf: &Path, out: &Path) -> Vec<u8> {
    let expected = std::fs::read(gguf.with_extension("safetensors")).unwrap();
    let tokens = out.with_extension("json");
    let ids = ids(&SafeTensors::deserialize(&expected).unwrap(), "ids");
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    larder_ok(&["logits", "-m", text(model), "--tokens", text(&tokens), "--out", text(out), "--force", "-oexact"]);
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

/// The index of the largest value.
fn largest(logits: &[f32]) -> i32 {
    let at = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    at.expect("a vocabulary") as i32
}

/// The files that llama.cpp's converter made of checkpoints, with the greedy text of transformers.
#[test]
fn greedy_text_is_that_of_transformers() {
    let mut compared = 0;
    for gguf in files() {
        let want = std::fs::read(gguf.with_extension("safetensors")).unwrap();
        let want = SafeTensors::deserialize(&want).unwrap();
        if want.tensor("generated_ids").is_err() {
            continue;
        }
        let (all, generated) = (ids(&want, "ids"), ids(&want, "generated_ids"));
        assert!(all.ends_with(&generated) && generated.len() >= 12);
        let dir = tempfile::tempdir().unwrap();
        let got = logits(&gguf, &gguf, &dir.path().join("out"));
        let got = floats(&SafeTensors::deserialize(&got).unwrap(), "full_logits");
        // Each token of the greedy text follows from the logits of the token before it.
        let rows = got.chunks_exact(got.len() / all.len()).skip(all.len() - generated.len() - 1);
        let chosen: Vec<i32> = rows.map(largest).take(generated.len()).collect();
        assert_eq!(chosen, generated, "{}", gguf.display());
        compared += 1;
    }
    assert!(compared >= 4);
}

/// Beside some files lie texts with the ids that the tokenizer of the checkpoint gives them.
#[test]
fn texts_have_the_ids_of_the_checkpoint() {
    let mut compared = 0;
    for gguf in files() {
        let Ok(cases) = std::fs::read(gguf.with_extension("tokens.json")) else { continue };
        let cases: Vec<(String, Vec<u32>)> = serde_json::from_slice(&cases).unwrap();
        for (given, ids) in cases {
            let out = larder_ok(&["tokenize", "-m", text(&gguf), "--", &given]);
            let json: serde_json::Value = serde_json::from_str(&out).unwrap();
            assert_eq!(json["ids"], serde_json::json!(ids), "{given:?}");
            compared += 1;
        }
    }
    assert!(compared >= 5);
}

#[test]
fn mxfp4_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    larder_ok(&["convert", text(&fixture("fixtures/gguf/tiny-gpt-oss-mxfp4.gguf")), text(&store)]);
    let store = Store::open(&store).unwrap();
    for layer in 0..4 {
        assert_eq!(store.layout(LayerIdx(layer)).kinds(), [NumberFormat::Mxfp4; 3].into());
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
