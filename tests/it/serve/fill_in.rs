//! Fill in the middle: a completion between two texts, for models with tokens for it.

use std::fs;

use serde_json::{Value, json};

use super::api::Server;
use super::model_with_template;
use crate::support::fixture;

/// A tiny model whose tokenizer has fill-in tokens, and their ids.
fn model() -> (tempfile::TempDir, [u64; 3]) {
    let folder = model_with_template("hermes");
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let size = tokenizer["model"]["vocab"].as_object().unwrap().len() as u64;
    let ids = [size - 3, size - 2, size - 1];
    let names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
    // They take the places of the last ids, which only their own merges make.
    tokenizer["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| !ids.contains(&id.as_u64().unwrap()));
    let words: Vec<String> = tokenizer["model"]["vocab"].as_object().unwrap().keys().cloned().collect();
    tokenizer["model"]["merges"].as_array_mut().unwrap().retain(|merge| {
        let pair: Vec<&str> = match merge {
            Value::String(pair) => pair.split(' ').collect(),
            pair => pair.as_array().unwrap().iter().map(|part| part.as_str().unwrap()).collect(),
        };
        words.contains(&pair.concat())
    });
    for (id, name) in ids.iter().zip(names) {
        tokenizer["model"]["vocab"][name] = json!(id);
        tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }));
    }
    fs::write(&path, tokenizer.to_string()).unwrap();
    (folder, ids)
}

#[test]
fn the_gap_between_two_texts_is_completed() {
    let (folder, [before, after, gap]) = model();
    let server = Server::start(folder.path(), &["--context", "128"]);
    let tokens = |text: &str, special: bool| -> Vec<u64> {
        let body = json!({"content": text, "add_special": special});
        server.post("/tokenize", body).json()["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap())
            .collect()
    };
    let (first, last) = ("def add(a, b):", "return sum");
    let prompt =
        [tokens("", true), vec![before], tokens(first, false), vec![after], tokens(last, false), vec![gap]].concat();
    let common = json!({"max_tokens": 8, "temperature": 0, "ignore_eos": true, "logprobs": 1});
    let with = |more: Value| {
        let mut body = common.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", body)
    };
    let want = with(json!({"prompt": prompt})).json();
    let got = with(json!({"prompt": first, "suffix": last})).json();
    assert_eq!(got["choices"], want["choices"]);
    assert_eq!(got["usage"]["prompt_tokens"], prompt.len());
    // Without a text behind the gap it is a completion.
    let plain = with(json!({"prompt": first, "suffix": ""})).json();
    assert_eq!(plain["usage"]["prompt_tokens"], tokens(first, true).len());
    let llama =
        json!({"input_prefix": first, "input_suffix": last, "n_predict": 8, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.post("/infill", llama.clone()).json()["content"], want["choices"][0]["text"]);
    let mut begun = llama;
    begun["prompt"] = json!("    return");
    let begun = server.post("/infill", begun).json();
    assert_eq!(begun["tokens_evaluated"], prompt.len() + tokens("    return", false).len());
    let ollama =
        json!({"prompt": first, "suffix": last, "stream": false, "options": {"num_predict": 8, "temperature": 0}});
    assert_eq!(server.post("/api/generate", ollama).json()["prompt_eval_count"], prompt.len());
    for body in [json!({"prompt": [5, 6], "suffix": "x"}), json!({"prompt": "x", "suffix": "y", "echo": true})] {
        assert_eq!(with(body).status, 400);
    }
}

#[test]
fn models_without_its_tokens_refuse_a_suffix() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "64"]);
    for (path, field) in [("/v1/completions", "error"), ("/api/generate", "error"), ("/infill", "error")] {
        let body = json!({"prompt": "x", "suffix": "y", "input_prefix": "x", "input_suffix": "y"});
        let refused = server.post(path, body);
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert!(refused.json()[field].to_string().contains("no fill-in tokens"), "{}", refused.body);
    }
}
