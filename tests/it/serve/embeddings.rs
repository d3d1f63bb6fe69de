//! Embeddings: the mean hidden states of transformers, whatever the pieces and neighbours, in the formats of both APIs.

use std::thread;

use serde_json::{Value, json};

use super::api::Server;
use crate::cache::gpu::no_emulator;
use crate::support::reference::Reference;
use crate::support::{encoder_decoders, fixture, golden_models, larder_ok};

fn vector(value: &Value) -> Vec<f32> {
    let numbers = value.as_array().unwrap_or_else(|| panic!("{value}"));
    numbers.iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn embedding(server: &Server, input: Value) -> Vec<f32> {
    let answer = server.post("/v1/embeddings", json!({"input": input})).json();
    vector(&answer["data"][0]["embedding"])
}

#[test]
fn they_are_the_mean_hidden_states_of_transformers() {
    for name in ["olmoe", "qwen3_next", "lfm2_moe", "deepseek_v2", "gpt_oss"] {
        let folder = fixture("golden").join(name);
        assert!(golden_models().contains(&folder), "{name} is a golden model");
        let reference = Reference::read(&folder);
        let tokens = reference.tokens("full_ids");
        let stages = reference.names().filter_map(|name| name.strip_prefix("hidden.")?.parse::<usize>().ok());
        let last = reference.floats(&format!("hidden.{}", stages.max().unwrap()));
        let hidden = last.len() / tokens.len();
        let mut sum = vec![0.0f64; hidden];
        last.chunks(hidden).for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)));
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let server = Server::start(&folder, &["--context", "128", "-oexact"]);
        let got = embedding(&server, json!(tokens));
        assert_eq!(got.len(), hidden, "{name}");
        for (got, want) in got.iter().zip(sum) {
            assert!((f64::from(*got) - want / length).abs() < 1e-4, "{name}: {got} instead of {}", want / length);
        }
    }
}

#[test]
fn neither_pieces_nor_neighbours_change_a_bit() {
    let demo = fixture("../models/demo");
    let texts: Vec<String> =
        (0..5).map(|i| format!("{} the old house by the sea, {i}", "Of ships and ".repeat(3 * i))).collect();
    let alone = Server::start(&demo, &["--context", "128", "--parallel", "1"]);
    let want: Vec<Vec<f32>> = texts.iter().map(|text| embedding(&alone, json!(text))).collect();
    assert!((1..5).all(|i| want[i] != want[0]));
    for flags in [&["-o", "prefill-tokens=5"][..], &["--kv-mem", "1500000", "--step-time", "0.001"]] {
        let server = Server::start(&demo, &[&["--context", "128", "--parallel", "4"], flags].concat());
        thread::scope(|scope| {
            let body = json!({"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": true});
            let other = scope.spawn(|| server.post("/v1/completions", body).json());
            let answer = server.post("/v1/embeddings", json!({"input": texts})).json();
            for (i, want) in want.iter().enumerate() {
                assert_eq!(answer["data"][i]["index"], i, "{answer}");
                assert_eq!(vector(&answer["data"][i]["embedding"]), *want, "text {i}");
            }
            let other = other.join().unwrap();
            assert_eq!(other["usage"]["completion_tokens"], 100, "{other}");
        });
        // What the prefix cache has of a text is not left out.
        assert_eq!(embedding(&server, json!(texts[4])), want[4]);
    }
}

/// Hidden states are waited for between the layers of a device that chooses the experts.
#[test]
fn a_device_changes_no_bit() {
    if no_emulator() {
        return;
    }
    for name in ["olmoe", "zaya", "qwen4_exp"] {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        larder_ok(&["convert", fixture("golden").join(name).to_str().unwrap(), store.to_str().unwrap()]);
        let flags = ["--context", "64", "--device", "emulated"];
        let (host, device) = (Server::start(&store, &flags[..2]), Server::start(&store, &flags));
        for i in 0..30 {
            let tokens = json!([5 + i, 9 + 7 * i, 2]);
            assert_eq!(embedding(&device, tokens.clone()), embedding(&host, tokens), "{name}, text {i}");
        }
    }
}

#[test]
fn both_apis_have_their_formats() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    let whole = server.post("/v1/embeddings", json!({"input": ["A house", "The sea"]})).json();
    assert_eq!((&whole["object"], &whole["data"][1]["object"]), (&json!("list"), &json!("embedding")));
    let count = |text: &str| {
        server.post("/tokenize", json!({"content": text, "add_special": true})).json()["tokens"]
            .as_array()
            .unwrap()
            .len()
    };
    assert_eq!(whole["usage"]["prompt_tokens"], count("A house") + count("The sea"));
    let vectors = [0, 1].map(|i| whole["data"][i]["embedding"].clone());
    let length: f32 = vector(&vectors[0]).iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    let packed = server.post("/v1/embeddings", json!({"input": "A house", "encoding_format": "base64"})).json();
    let packed = packed["data"][0]["embedding"].as_str().unwrap().len();
    assert_eq!(packed, (4 * vector(&vectors[0]).len()).div_ceil(3) * 4);
    let ollama = server.post("/api/embed", json!({"model": "demo:latest", "input": ["A house", "The sea"]})).json();
    assert_eq!(ollama["embeddings"], json!(vectors));
    let one = server.post("/api/embeddings", json!({"prompt": "The sea"})).json();
    assert_eq!(one["embedding"], vectors[1]);
    let size = vector(&vectors[0]).len();
    assert_eq!(server.post("/embeddings", json!({"input": "A", "dimensions": size})).status, 200);
    for (body, status, part) in [
        (json!({"input": "A", "dimensions": size - 1}), 400, "dimensions"),
        (json!({"input": ""}), 400, "empty"),
        (json!({"input": []}), 400, "input"),
        (json!({"input": "A", "encoding_format": "int8"}), 400, "encoding_format"),
        (json!({"input": "house ".repeat(200)}), 400, "context length"),
        (json!({"input": [[999_999]]}), 400, "vocabulary"),
        (json!({}), 400, "input"),
    ] {
        let refused = server.post("/v1/embeddings", body);
        assert!(refused.status == status && refused.body.contains(part), "{}", refused.body);
    }
}

#[test]
fn models_with_an_encoder_have_none() {
    let server = Server::start(&encoder_decoders()[0], &["--context", "64"]);
    let refused = server.post("/v1/embeddings", json!({"input": [5, 6, 7]}));
    assert!(refused.status == 400 && refused.body.contains("encoder"), "{}", refused.body);
}
