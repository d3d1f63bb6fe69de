//! Routes beside generation: tokens, templates, properties; biases of tokens, and limits of answers.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

fn demo() -> PathBuf {
    fixture("../models/demo")
}

#[test]
fn texts_become_tokens_and_texts_again() {
    let server = Server::start(&demo(), &["--context", "128"]);
    let text = "The old man, and the sea: 42.";
    let ids = server.post("/tokenize", json!({"content": text})).json()["tokens"].clone();
    assert!(ids.as_array().unwrap().len() > 5, "{ids}");
    assert_eq!(server.post("/detokenize", json!({"tokens": ids})).json()["content"], text);
    let pieces = server.post("/tokenize", json!({"content": "The old", "with_pieces": true})).json();
    let joined: String = pieces["tokens"].as_array().unwrap().iter().filter_map(|t| t["piece"].as_str()).collect();
    assert_eq!(joined, "The old");
    let long = server.post("/tokenize", json!({"content": "loaf ".repeat(5000)}));
    assert_eq!((long.status, long.json()["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
}

#[test]
fn the_rendered_prompt_is_the_one_that_is_tokenised() {
    let server = Server::start(&fixture("golden/olmoe"), &["--context", "256"]);
    let messages = json!([{"role": "user", "content": "How many loaves?"}]);
    let prompt = server.post("/apply-template", json!({"messages": messages})).json()["prompt"].clone();
    assert!(prompt.as_str().unwrap().contains("How many loaves?"), "{prompt}");
    let answer = |path: &str, mut body: Value| {
        (body["max_tokens"], body["temperature"], body["ignore_eos"]) = (json!(8), json!(0), json!(true));
        server.post(path, body).json()
    };
    let chat = answer("/chat/completions", json!({"messages": messages}));
    let ids = server.post("/tokenize", json!({"content": prompt})).json()["tokens"].clone();
    let completion = answer("/completions", json!({"prompt": ids}));
    assert_eq!(chat["choices"][0]["message"]["content"], completion["choices"][0]["text"]);
    assert_eq!(chat["usage"]["prompt_tokens"], completion["usage"]["prompt_tokens"]);
    let props = server.get("/props").json();
    assert_eq!((&props["default_generation_settings"]["n_ctx"], &props["total_slots"]), (&json!(256), &json!(4)));
    assert_eq!(props["context_full"], "stop");
    assert_eq!(server.get("/models").json(), server.get("/v1/models").json());
}

#[test]
fn a_bias_bans_and_forces_tokens() {
    let server = Server::start(&demo(), &["--context", "64"]);
    let ask = |bias: Value| {
        let body =
            json!({"prompt": "Once upon a", "max_tokens": 3, "temperature": 0, "logit_bias": bias, "ignore_eos": true});
        server.post("/v1/completions", body).json()
    };
    let text = |bias: Value| ask(bias)["choices"][0]["text"].as_str().unwrap().to_owned();
    let plain = text(json!({}));
    let first = server.post("/tokenize", json!({"content": plain})).json()["tokens"][0].clone();
    let banned = text(json!({first.to_string(): -100}));
    assert_ne!(banned, plain);
    let forced = text(json!({first.to_string(): 100}));
    let piece = server.post("/detokenize", json!({"tokens": [first]})).json()["content"].clone();
    assert_eq!(forced, piece.as_str().unwrap().repeat(3));
    assert_eq!(ask(json!({"999999": 1}))["error"]["param"], "logit_bias");
}

#[test]
fn a_limit_of_minus_one_fills_the_context() {
    let server = Server::start(&demo(), &["--context", "40"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": -1, "temperature": 0, "ignore_eos": true});
    let answer = server.post("/v1/completions", body).json();
    assert_eq!(answer["usage"]["total_tokens"], 40, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}
