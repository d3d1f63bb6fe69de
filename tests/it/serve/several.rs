//! Several answers to one request: `n`, and several prompts.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn asked(prompt: Value, more: Value) -> Value {
    let mut body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap_or_else(|| panic!("{answer}"));
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i, "{answer}");
    }
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn answers_are_those_of_requests_for_one() {
    let server = Server::start(&demo(), &["--context", "128", "--parallel", "3"]);
    let ask = |prompt: Value, more: Value| server.post("/v1/completions", asked(prompt, more)).json();
    let one = |prompt: &str, seed: u64| texts(&ask(json!(prompt), json!({"seed": seed}))).remove(0);
    let (first, second) = ("The old man", "Once upon a time there was");
    let three = ask(json!(first), json!({"n": 3}));
    assert_eq!(texts(&three), [one(first, 7), one(first, 8), one(first, 9)]);
    let alone = ask(json!(first), json!({}));
    assert_eq!(three["usage"]["prompt_tokens"], alone["usage"]["prompt_tokens"]);
    assert_eq!(three["usage"]["completion_tokens"], 36);
    assert!(three["timings"].is_null() && alone["timings"].is_object(), "times are those of one answer");
    let both = ask(json!([first, second]), json!({"n": 2}));
    assert_eq!(texts(&both), [one(first, 7), one(first, 8), one(second, 7), one(second, 8)]);
    let tokens = ["prompt_tokens", "completion_tokens", "total_tokens"].map(|key| both["usage"][key].as_u64().unwrap());
    let other = ask(json!(second), json!({}))["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens[0], alone["usage"]["prompt_tokens"].as_u64().unwrap() + other);
    assert_eq!((tokens[1], tokens[2]), (48, tokens[0] + 48));
}

#[test]
fn a_stream_has_the_pieces_of_all_answers() {
    let server = Server::start(&demo(), &["--context", "128", "--parallel", "2"]);
    let whole = server.post("/v1/completions", asked(json!(["A", "The sea"]), json!({"n": 2, "logprobs": 1}))).json();
    let more = json!({"n": 2, "logprobs": 1, "stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.post("/v1/completions", asked(json!(["A", "The sea"]), more)).chunks();
    let mut streamed = vec![(String::new(), Vec::new(), 0); 4];
    for chunk in &chunks[..chunks.len() - 1] {
        let choice = &chunk["choices"][0];
        let (text, offsets, ends) = &mut streamed[choice["index"].as_u64().unwrap() as usize];
        *text += choice["text"].as_str().unwrap();
        offsets.extend(choice["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default());
        *ends += usize::from(!choice["finish_reason"].is_null());
    }
    for (i, (text, offsets, ends)) in streamed.into_iter().enumerate() {
        let choice = &whole["choices"][i];
        assert_eq!(
            (json!(text), json!(offsets), ends),
            (choice["text"].clone(), choice["logprobs"]["text_offset"].clone(), 1)
        );
    }
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    let chat =
        json!({"messages": [{"role": "user", "content": "Hello"}], "n": 2, "stream": true, "max_tokens": 3, "seed": 1});
    let chunks = server.post("/v1/chat/completions", chat).chunks();
    let roles = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant");
    assert_eq!(roles.count(), 2);
}

#[test]
fn all_answers_match_their_format() {
    let server = Server::start(&demo(), &["--context", "128"]);
    let body = json!({"prompt": ["A year:", "A date:"], "n": 3, "regex": "[0-9]{4}", "temperature": 1.5, "seed": 2});
    let answer = server.post("/v1/completions", body).json();
    let years = texts(&answer);
    assert!(years.len() == 6 && years.iter().all(|year| year.len() == 4 && year.parse::<u32>().is_ok()), "{years:?}");
    assert!(years.iter().any(|year| *year != years[0]), "{years:?}");
}

#[test]
fn what_does_not_fit_the_queue_is_refused_whole() {
    let server = Server::start(&demo(), &["--context", "128", "--parallel", "1", "--queue", "2"]);
    let refused = server.post("/v1/completions", asked(json!("x"), json!({"n": 8, "max_tokens": 100})));
    assert_eq!(refused.status, 429, "{}", refused.body);
    let answer = server.post("/v1/completions", asked(json!("x"), json!({"n": 2}))).json();
    assert_eq!(texts(&answer).len(), 2);
}
