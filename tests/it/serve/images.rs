//! Images through every door, on tiny checkpoints with towers.

use std::fs;

use serde_json::{Value, json};

use crate::serve::api::Server;
use crate::support::fixture;

pub const MODELS: [&str; 2] = ["qwen3_vl_moe", "qwen3_5_moe"];

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |chunk: &[u8]| {
        let bits = chunk.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        let letter = |i: usize| if i <= chunk.len() { LETTERS[(bits >> (18 - 6 * i) & 63) as usize] } else { b'=' };
        [0, 1, 2, 3].map(|i| char::from(letter(i)))
    };
    bytes.chunks(3).flat_map(group).collect()
}

pub fn bytes(image: &str) -> Vec<u8> {
    fs::read(fixture(&format!("vision/images/{image}.png"))).unwrap()
}

fn file(image: &str) -> String {
    base64(&bytes(image))
}

pub fn url(image: &str) -> String {
    format!("data:image/png;base64,{}", file(image))
}

pub fn server(model: &str) -> Server {
    Server::start(&fixture(&format!("vision/{model}")), &["--context", "1024"])
}

/// A question about images: names of files with an @ before them, and texts.
fn user(parts: &[&str]) -> Value {
    let part = |part: &&str| match part.strip_prefix('@') {
        Some(image) => json!({"type": "image_url", "image_url": {"url": url(image)}}),
        None => json!({"type": "text", "text": part}),
    };
    json!({"role": "user", "content": parts.iter().map(part).collect::<Vec<_>>()})
}

pub fn ask(server: &Server, messages: Value) -> Value {
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": true, "top_logprobs": 3,
                      "ignore_eos": true});
    let response = server.post("/v1/chat/completions", body);
    assert_eq!(response.status, 200, "{}", response.body);
    response.json()
}

pub fn said(answer: &Value) -> (&Value, &Value) {
    (&answer["choices"][0]["message"]["content"], &answer["choices"][0]["logprobs"])
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn the_prompts_of_the_references_are_rendered() {
    for model in MODELS {
        let (server, reference) =
            (server(model), fs::read(fixture(&format!("vision/{model}/reference.json"))).unwrap());
        let reference: Value = serde_json::from_slice(&reference).unwrap();
        for (name, prompt) in reference["prompts"].as_object().unwrap() {
            let mut names = prompt["images"].as_array().unwrap().iter();
            let mut messages = prompt["messages"].clone();
            let parts =
                messages.as_array_mut().unwrap().iter_mut().filter_map(|message| message["content"].as_array_mut());
            for part in parts.flatten().filter(|part| part["type"] == "image") {
                *part = json!({"type": "input_image", "image_url": url(names.next().unwrap().as_str().unwrap())});
            }
            let rendered = server.post("/apply-template", json!({"messages": messages})).json();
            assert_eq!(rendered["prompt"], prompt["text"], "{model} {name}");
        }
    }
}

#[test]
fn every_door_sees_the_same() {
    for model in MODELS {
        let (server, question) = (server(model), "What is this?");
        let body = json!({"messages": [user(&["@odd", question])], "temperature": 0, "max_tokens": 8});
        let want = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"].clone();
        let source = json!({"type": "base64", "media_type": "image/png", "data": file("odd")});
        let block = json!([{"type": "image", "source": source}, {"type": "text", "text": question}]);
        let items = json!([{"type": "input_image", "image_url": url("odd")}, {"type": "input_text", "text": question}]);
        let options = json!({"temperature": 0, "num_predict": 8});
        let of_ollama = json!([{"role": "user", "content": question, "images": [file("odd")]}]);
        for (path, body, place) in [
            (
                "/v1/messages",
                json!({"messages": [{"role": "user", "content": block}], "temperature": 0, "max_tokens": 8}),
                "/content/0/text",
            ),
            (
                "/v1/responses",
                json!({"input": [{"role": "user", "content": items}], "temperature": 0, "max_output_tokens": 8}),
                "/output/0/content/0/text",
            ),
            ("/api/chat", json!({"messages": of_ollama, "options": options, "stream": false}), "/message/content"),
            (
                "/api/generate",
                json!({"prompt": question, "images": [file("odd")], "options": options, "stream": false}),
                "/response",
            ),
        ] {
            let answer = server.post(path, body).json();
            assert_eq!(answer.pointer(place), Some(&want), "{model} {path}: {answer}");
        }
        assert_eq!(server.get("/props").json()["modalities"], json!({"vision": true, "audio": false}));
        let capabilities = server.post("/api/show", json!({})).json()["capabilities"].clone();
        assert!(capabilities.as_array().unwrap().contains(&json!("vision")), "{capabilities}");
    }
}

#[test]
fn warm_is_cold_and_the_order_of_pictures_counts() {
    for model in MODELS {
        let (first, second) = (user(&["@odd", "Look.", "@tall", "And here?"]), user(&["Once more: ", "@wide"]));
        let answered = json!({"role": "assistant", "content": "I see."});
        let whole = json!([first, answered, second]);
        let warm = server(model);
        ask(&warm, json!([first]));
        let again = ask(&warm, json!([first]));
        let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let images = tokens(&again) - tokens(&ask(&warm, json!([user(&["Look.", "And here?"])])));
        assert!(cached(&again) > images, "{model}: {}", again["usage"]);
        let later = ask(&warm, whole.clone());
        assert!(cached(&later) > images, "{model}: {}", later["usage"]);
        let cold = ask(&server(model), whole);
        assert_eq!(said(&later), said(&cold), "{model}");
        let swapped = ask(&warm, json!([user(&["@tall", "Look.", "@odd", "And here?"])]));
        assert_ne!(said(&swapped), said(&again), "{model}");
    }
}

#[test]
fn saved_sequences_have_their_pictures() {
    let (model, folder) = (MODELS[0], tempfile::tempdir().unwrap());
    let flags = ["--context", "1024", "--session-dir", folder.path().to_str().unwrap()];
    let path = fixture(&format!("vision/{model}"));
    let messages = json!([user(&["@odd", "Look.", "@tall", "And here?"])]);
    let first = Server::start(&path, &flags);
    let before = ask(&first, messages.clone());
    first.stop();
    let second = Server::start(&path, &flags);
    let after = ask(&second, messages);
    assert!(cached(&after) > 16, "{}", after["usage"]);
    assert_eq!(said(&after), said(&before));
}

#[test]
fn hostile_pictures_are_refused_in_a_sentence() {
    let server = server(MODELS[0]);
    let png = bytes("odd");
    let mut bomb = png.clone();
    bomb[16..24].copy_from_slice(&[0, 0, 0xc3, 0x50, 0, 0, 0xc3, 0x50]);
    let data = |bytes: &[u8]| format!("data:image/png;base64,{}", base64(bytes));
    for picture in [
        data(&bomb),
        data(&png[..png.len() - 20]),
        data(b"no picture at all"),
        "data:image/png;base64,****".to_owned(),
        "http://127.0.0.1:1/private-name".to_owned(),
        "file:///etc/private-name".to_owned(),
    ] {
        let part = json!({"type": "image_url", "image_url": {"url": picture}});
        let body = json!({"messages": [{"role": "user", "content": [part]}]});
        let refused = server.post("/v1/chat/completions", body);
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(refused.status, 400, "{message}");
        assert!(message.ends_with('.') && message.len() < 300 && !message.contains("private"), "{message}");
    }
    ask(&server, json!([user(&["@dot", "?"])]));
}

#[test]
fn a_model_that_reads_text_names_those_that_see() {
    let server = Server::start(&fixture("golden/olmoe"), &[]);
    let body = json!({"messages": [user(&["@odd", "?"])]});
    let refused = server.post("/v1/chat/completions", body);
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("qwen3_vl_moe"), "{}", refused.body);
}
