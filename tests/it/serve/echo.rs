//! Prompts that are echoed, with their log-probabilities.

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

fn ask(server: &Server, more: Value) -> Value {
    let mut body = json!({"temperature": 0, "ignore_eos": true, "logprobs": 2});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", body).json();
    assert!(answer["choices"].is_array(), "{answer}");
    answer["choices"][0].clone()
}

#[test]
fn log_probabilities_of_a_prompt_are_those_with_which_it_was_generated() {
    for model in ["../models/demo", "golden/qwen3_next", "golden/deepseek_v3"] {
        let server = Server::start(&fixture(model), &["--context", "256"]);
        let prompt = "The old man and the sea, and the old house on the hill. ".repeat(2);
        let generated = ask(&server, json!({"prompt": prompt, "max_tokens": 40}));
        let prompt_ids =
            server.post("/tokenize", json!({"content": prompt, "add_special": true})).json()["tokens"].clone();
        let whole = ask(&server, json!({"prompt": prompt, "max_tokens": 40, "echo": true}));
        let count = prompt_ids.as_array().unwrap().len();
        let list = |choice: &Value, key: &str| choice["logprobs"][key].as_array().unwrap().clone();
        for key in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(list(&whole, key).len(), count + 40, "{model} {key}");
            assert_eq!(list(&whole, key)[count..], list(&generated, key), "{model} {key}");
        }
        assert_eq!(
            (&list(&whole, "token_logprobs")[0], &list(&whole, "top_logprobs")[0]),
            (&Value::Null, &Value::Null)
        );
        assert!(list(&whole, "token_logprobs")[1..].iter().all(|p| p.as_f64().is_some_and(|p| p <= 0.0)), "{model}");
        // The same tokens as a prompt alone, beside another request and behind the prefix cache.
        let ids: Vec<Value> = prompt_ids.as_array().unwrap().clone();
        let halves = [(&ids[..count / 2], count / 2), (&ids[..], count)];
        for (ids, count) in halves {
            let alone = ask(&server, json!({"prompt": ids, "max_tokens": 0, "echo": true}));
            assert_eq!((list(&alone, "tokens").len(), &alone["finish_reason"]), (count, &json!("length")), "{model}");
            assert_eq!(list(&alone, "token_logprobs"), list(&whole, "token_logprobs")[..count], "{model}");
        }
    }
}

#[test]
fn the_prompt_is_the_beginning_of_the_text_streamed_too() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "128"]);
    let prompt = "Once upon a time";
    let body = json!({"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true, "echo": true});
    let whole = server.post("/v1/completions", body.clone()).json();
    let text = whole["choices"][0]["text"].as_str().unwrap();
    assert!(
        text.starts_with(prompt) && text.len() > prompt.len() && whole["usage"]["completion_tokens"] == 6,
        "{whole}"
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let chunks = server.post("/v1/completions", streamed).chunks();
    let joined: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, text);
    let refused = server.post("/v1/completions", json!({"prompt": prompt, "max_tokens": 0}));
    assert_eq!((refused.status, refused.json()["error"]["param"].as_str()), (400, Some("max_tokens")));
}
