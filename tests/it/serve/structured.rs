//! Structured output: answers match what the request says, and nothing else changes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::api::Server;
use crate::support::fixture;

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["old", "young"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

fn asked(prompt: &str, more: Value) -> Value {
    let mut body = json!({"prompt": prompt, "max_tokens": 200, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The text of an answer that ended by itself.
fn ended(answer: &Value) -> &str {
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

fn assert_is_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["name", "age", "tags"], "{text}");
    assert!(value["name"].as_str().is_some_and(|name| name.chars().count() <= 12), "{text}");
    assert!(value["age"].as_u64().is_some_and(|age| age <= 150), "{text}");
    let tags = value["tags"].as_array().unwrap();
    assert!(tags.len() <= 2 && tags.iter().all(|tag| tag == "old" || tag == "young"), "{text}");
}

#[test]
fn answers_match_their_schema_greedy_sampled_and_streamed() {
    let server = Server::start(&demo(), &["--context", "512"]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": person()}});
    let greedy = server.post("/v1/completions", asked("The old man is", json!({"response_format": format}))).json();
    assert_is_person(ended(&greedy));
    for seed in 0..20 {
        let sampled = json!({"json_schema": person(), "temperature": 1.5, "seed": seed});
        let answer = server.post("/v1/completions", asked("The old man is", sampled)).json();
        assert_is_person(ended(&answer));
    }
    let chat = json!({
        "messages": [{"role": "user", "content": "Who is at the door?"}], "response_format": format, "stream": true,
        "temperature": 1.0, "seed": 4, "max_tokens": 200, "logprobs": true,
    });
    let streamed = server.post("/v1/chat/completions", chat).chunks();
    let text: String = streamed.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_is_person(&text);
}

#[test]
fn regular_expressions_grammars_and_any_object() {
    let server = Server::start(&demo(), &["--context", "512"]);
    let text = |more: Value| {
        let answer = server.post("/v1/completions", asked("The answer is", more)).json();
        ended(&answer).to_owned()
    };
    for seed in 0..10 {
        let draw = |mut more: Value| {
            (more["temperature"], more["seed"]) = (json!(1.5), json!(seed));
            text(more)
        };
        let date = draw(json!({"regex": "[0-9]{4}-(0[1-9]|1[0-2])"}));
        let (year, month) = date.split_once('-').unwrap();
        assert!(year.len() == 4 && year.parse::<u32>().is_ok() && (1..=12).contains(&month.parse().unwrap()), "{date}");
        let nested = draw(json!({"grammar": "start: \"[\" start \"]\" | \"yes\" | \"no\""}));
        let inner = nested.trim_start_matches('[').trim_end_matches(']');
        assert!(["yes", "no"].contains(&inner), "{nested}");
        assert_eq!(nested.matches('[').count(), nested.matches(']').count(), "{nested}");
    }
    // A word that can only be one is written without the model's choice.
    assert_eq!(text(json!({"regex": "exactly this"})), "exactly this");
    let object = asked(
        "{",
        json!({"response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 1.0, "seed": 1}),
    );
    let answer = server.post("/v1/completions", object).json();
    let text = answer["choices"][0]["text"].as_str().unwrap();
    match answer["choices"][0]["finish_reason"].as_str() {
        Some("stop") => assert!(serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()), "{text}"),
        other => assert!(other == Some("length") && text.trim_start().starts_with('{'), "{answer}"),
    }
}

#[test]
fn neighbours_with_and_without_a_format_change_nothing() {
    let server = Server::start(&demo(), &["--context", "512", "--parallel", "4"]);
    let ask = |i: usize| {
        let more = match i % 2 {
            0 => json!({"temperature": 1.0, "seed": i, "max_tokens": 40}),
            _ => json!({"temperature": 1.0, "seed": i, "json_schema": person()}),
        };
        server.post("/v1/completions", asked("Once there was", more)).json()["choices"].clone()
    };
    let alone: Vec<Value> = (0..8).map(ask).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|i| scope.spawn(move || ask(i))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    let server = Server::start(&demo(), &["--context", "512"]);
    for (more, param, part) in [
        (json!({"json_schema": {"type": "string", "not": {"const": "a"}}}), "json_schema", "not"),
        (
            json!({"response_format": {"type": "json_object", "schema": {"type": "giraffe"}}}),
            "response_format",
            "giraffe",
        ),
        (json!({"regex": "(a"}), "regex", "regex"),
        (json!({"grammar": "start: nothing"}), "grammar", "nothing"),
    ] {
        let refused = server.post("/v1/completions", asked("x", more.clone()));
        let error = &refused.json()["error"];
        assert_eq!(
            (error["code"].as_str(), error["param"].as_str()),
            (Some("invalid_grammar"), Some(param)),
            "{error}"
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(part) && !message.contains('\n'), "{more}: {message}");
    }
    // Some are found to be too costly only when their first mask is computed.
    let costly = json!({"type": "string", "pattern": "^(a+)+$", "minLength": 50_000});
    let refused = server.post("/v1/completions", asked("x", json!({"json_schema": costly})));
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (400, Some("invalid_grammar")));
    let answer = server.post("/v1/completions", asked("x", json!({"max_tokens": 2, "ignore_eos": true}))).json();
    assert_eq!(answer["usage"]["completion_tokens"], 2, "the server goes on: {answer}");
}

/// Two dozen clients ask for formats that take minutes to compile, or as long as they may.
#[test]
fn costly_formats_hold_up_no_plain_request() {
    let server = Server::start(&demo(), &["--context", "512"]);
    let patterns: serde_json::Map<_, _> =
        (0..400).map(|i| (format!("^k{i}_[a-z]+$"), json!({"type": "null"}))).collect();
    let wide: serde_json::Map<_, _> = (0..2500).map(|i| (format!("key{i}"), json!({"type": "integer"}))).collect();
    let copies = |from: &str| format!("{from} ").repeat(2500);
    let costly = [
        json!({"max_tokens": 1, "json_schema": {"type": "object", "patternProperties": patterns}}),
        json!({"max_tokens": 1, "grammar": format!("start: A\nA: {}\nB: {}\nC: /[ab]c?/", copies("B"), copies("C"))}),
        json!({"max_tokens": 1, "json_schema": {"type": "object", "properties": wide, "additionalProperties": false}}),
    ];
    let plain = || {
        let begun = Instant::now();
        let answer = server.post("/v1/completions", asked("The old man", json!({"max_tokens": 4})));
        assert_eq!(answer.status, 200, "{}", answer.body);
        begun.elapsed()
    };
    plain();
    let alone = (0..3).map(|_| plain()).max().unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for i in 0..24 {
            let (server, costly, is_over) = (&server, &costly[i % 3], &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let answer = server.post("/v1/completions", asked("A", costly.clone()));
                    assert!(matches!(answer.status, 200 | 400 | 429), "{}", answer.body);
                }
            });
        }
        thread::sleep(Duration::from_millis(500));
        let beside = (0..5).map(|_| plain()).max();
        is_over.store(true, Ordering::Relaxed);
        println!("alone {alone:?}, beside costly formats {beside:?}");
        assert!(beside.unwrap() < alone + Duration::from_secs(1), "{beside:?} beside, {alone:?} alone");
    });
}
