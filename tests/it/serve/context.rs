//! Chats and texts that are longer than their context.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::api::{Response, Server};
use crate::support::{fixture, larder_ok};

const PROMPT: &str = "Once upon a time there was";

fn demo() -> PathBuf {
    fixture("../models/demo")
}

/// A body with further fields.
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn asked(prompt: Value, tokens: i64, more: Value) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true});
    with(body, more)
}

fn complete(server: &Server, prompt: Value, tokens: i64, more: Value) -> Value {
    server.post("/v1/completions", asked(prompt, tokens, more)).json()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value}")) as usize
}

fn tokenize(server: &Server, text: &str) -> Vec<u32> {
    let tokens = server.post("/tokenize", json!({"content": text, "add_special": true})).json();
    serde_json::from_value(tokens["tokens"].clone()).unwrap()
}

#[test]
fn a_shifted_answer_goes_on_like_a_prompt_of_what_is_kept() {
    const CONTEXT: usize = 64;
    const KEEP: usize = 4;
    const AFTER: usize = 25;
    let server = Server::start(&demo(), &["--context", "64", "--context-full", "shift"]);
    let prompt = tokenize(&server, PROMPT);
    let model = demo();
    let greedy = ["-n", "100", "--temperature", "0", "--ignore-eos", "--json"];
    let args = [&["run", "-m", model.to_str().unwrap(), "-p", PROMPT][..], &greedy].concat();
    let run: Value = serde_json::from_str(&larder_ok(&args)).unwrap();
    let ids: Vec<u32> = serde_json::from_value(run["ids"].clone()).unwrap();
    // The token that no longer fits is kept too.
    let before = CONTEXT - prompt.len() + 1;
    let all = [&prompt[..], &ids[..before]].concat();
    let dropped = (CONTEXT - KEEP).div_ceil(2);
    let kept = [&all[..KEEP], &all[KEEP + dropped..]].concat();
    let fresh = complete(&server, json!(kept), AFTER as i64, json!({"context_full": "stop"}));

    let tokens = (before + AFTER) as i64;
    let shifted = complete(&server, json!(prompt), tokens, json!({"n_keep": KEEP}));
    assert!(text(&shifted).ends_with(text(&fresh)), "{shifted} {fresh}");
    let used = &shifted["context_use"];
    assert_eq!((number(&used["shifts"]), number(&used["dropped_tokens"])), (1, dropped), "{used}");
    assert_eq!((number(&used["size"]), number(&used["tokens"])), (CONTEXT, kept.len() + AFTER), "{used}");
    assert_eq!(number(&shifted["usage"]["completion_tokens"]), before + AFTER);
    // A second time the same, and streamed.
    let stream = server.post("/v1/completions", asked(json!(prompt), tokens, json!({"n_keep": KEEP, "stream": true})));
    let chunks = stream.chunks();
    let streamed: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, text(&shifted));
    assert_eq!(&chunks.last().unwrap()["context_use"], used);
    let told: Vec<usize> =
        stream.body.lines().filter_map(|line| line.strip_prefix(": context ")?.parse().ok()).collect();
    assert!(told.len() >= 3 && told.iter().all(|tokens| *tokens <= CONTEXT), "{told:?}");
    assert!(told.windows(2).any(|pair| pair[1] < pair[0]), "a shift lowers it: {told:?}");
}

#[test]
fn shifts_repeat_until_the_limit_and_there_always_is_one() {
    for name in ["golden/olmoe", "golden/qwen3_next", "golden/lfm2_moe"] {
        let server = Server::start(&fixture(name), &["--context", "48"]);
        let ask = |tokens: i64, how: &str| complete(&server, json!([5, 17, 3]), tokens, json!({"context_full": how}));
        let long = ask(200, "shift");
        assert_eq!(
            (number(&long["usage"]["completion_tokens"]), &long["choices"][0]["finish_reason"]),
            (200, &json!("length"))
        );
        assert!(number(&long["context_use"]["shifts"]) >= 4, "{name}: {long}");
        // Without a limit, as many tokens as the context has.
        assert_eq!(number(&ask(-1, "shift")["usage"]["completion_tokens"]), 48, "{name}");
        for how in ["stop", "drop-turns"] {
            let ended = ask(200, how);
            assert_eq!(number(&ended["usage"]["completion_tokens"]), 45, "{name}: {ended}");
            assert_eq!(number(&ended["context_use"]["shifts"]), 0, "{name}: {ended}");
        }
    }
}

#[test]
fn formats_and_stop_strings_go_on_across_a_shift() {
    let server = Server::start(&demo(), &["--context", "64", "--context-full", "shift"]);
    let matched = complete(&server, json!(PROMPT), 2000, json!({"regex": "[a-z ]{300}[.]", "ignore_eos": false}));
    assert!(text(&matched).len() == 301 && text(&matched).ends_with('.'), "{matched}");
    assert!(
        matched["choices"][0]["finish_reason"] == "stop" && number(&matched["context_use"]["shifts"]) > 0,
        "{matched}"
    );

    let long = complete(&server, json!(PROMPT), 150, json!({}));
    let end = text(&long).char_indices().nth(text(&long).chars().count() - 12).unwrap().0;
    let stop = &text(&long)[end..];
    let stopped = complete(&server, json!(PROMPT), 150, json!({"stop": [stop]}));
    assert_eq!(text(&stopped), &text(&long)[..text(&long).find(stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop", "{stopped}");
}

#[test]
fn a_shift_changes_no_other_answer() {
    let server = Server::start(&demo(), &["--context", "96", "--parallel", "4", "--context-full", "shift"]);
    let ask = |i: usize| {
        let tokens = if i.is_multiple_of(2) { 250 } else { 40 };
        let answer = complete(&server, json!(PROMPT), tokens, json!({"temperature": 1.0, "seed": i}));
        (answer["choices"].clone(), answer["context_use"].clone())
    };
    let alone: Vec<_> = (0..8).map(ask).collect();
    assert!(number(&alone[0].1["shifts"]) > 2 && number(&alone[1].1["shifts"]) == 0, "{alone:?}");
    let together: Vec<_> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|i| scope.spawn(move || ask(i))).collect();
        asking.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
}

#[test]
fn a_text_that_is_too_long_keeps_its_beginning_and_its_end() {
    let server = Server::start(&demo(), &["--context", "64"]);
    let ids: Vec<u32> = (0..200).map(|i| 3 + i * 7 % 90).collect();
    let refused = server.post("/v1/completions", asked(json!(ids), 8, json!({"context_full": "drop-turns"})));
    assert!(refused.status == 400 && refused.body.contains("context_length_exceeded"), "{}", refused.body);
    let cut = complete(&server, json!(ids), 8, json!({"context_full": "shift", "n_keep": 10}));
    let kept = [&ids[..10], &ids[200 - 46..]].concat();
    let fresh = complete(&server, json!(kept), 8, json!({}));
    assert_eq!((text(&cut), &cut["usage"]["prompt_tokens"]), (text(&fresh), &json!(56)));
    assert_eq!(cut["context_use"]["dropped_tokens"], 144, "{cut}");
}

/// A turn of the dialogue.
fn question(i: usize) -> Value {
    json!({"role": "user", "content": format!("Question number {i}: what is in the old house by the sea, and who has the key?")})
}

fn chat(server: &Server, messages: &[Value], more: Value) -> Response {
    let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    server.post("/v1/chat/completions", with(body, more))
}

#[test]
fn a_dialogue_goes_on_far_beyond_its_context() {
    let server = Server::start(&fixture("golden/olmoe"), &["--context", "1024", "--log-level", "info"]);
    for how in ["drop-turns", "shift"] {
        let mut messages = vec![json!({"role": "system", "content": "Answer in one sentence."})];
        let (mut dropped, mut drops, mut reused) = (0, 0, 0);
        for i in 0..30 {
            messages.push(question(i));
            let response = chat(&server, &messages, json!({"context_full": how}));
            assert_eq!(response.status, 200, "{how} {i}: {}", response.body);
            let answer = response.json();
            let (used, usage) = (&answer["context_use"], &answer["usage"]);
            let (prompt, cached) =
                (number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]));
            assert!(prompt + 12 <= 1024 && number(&used["tokens"]) == prompt + 12, "{answer}");
            let now = number(&used["dropped_turns"]);
            assert_eq!(now > 0, number(&used["dropped_tokens"]) > 0, "{used}");
            // What is left is what a client would send that drops the turns itself.
            if now != dropped {
                let shorter = [&messages[..1], &messages[1 + 2 * now..]].concat();
                assert_eq!(chat(&server, &shorter, json!({})).json()["choices"], answer["choices"], "{how} {i}");
                drops += 1;
            } else if now > 0 {
                assert!(2 * cached > prompt, "{how} {i}: {cached} of {prompt} cached");
                reused += 1;
            }
            dropped = now;
            messages.push(answer["choices"][0]["message"].clone());
        }
        assert!(
            dropped > 10 && drops > 1 && reused > drops,
            "{how}: {dropped} dropped, {drops} times, {reused} reused"
        );
        messages.push(question(30));
        let refused = chat(&server, &messages, json!({}));
        assert!(refused.status == 400 && refused.body.contains("context_length_exceeded"), "{}", refused.body);
    }
    // A turn that is too long alone has the error of always.
    let long = [json!({"role": "user", "content": "word and ".repeat(600)})];
    for how in ["stop", "drop-turns", "shift"] {
        let refused = chat(&server, &long, json!({"context_full": how}));
        assert!(refused.status == 400 && refused.body.contains("context_length_exceeded"), "{how}: {}", refused.body);
    }
}

#[test]
fn each_api_says_what_was_cut() {
    let (server, log) = Server::start_logged(&fixture("golden/olmoe"), &["--context", "256", "--log-level", "info"]);
    let messages: Vec<Value> =
        (0..9).flat_map(|i| [question(i), json!({"role": "assistant", "content": "A box."})]).collect();
    let messages = [&messages[..], &[question(9)]].concat();
    let body = |more: Value| with(json!({"max_tokens": 8, "context_full": "drop-turns"}), more);
    let check = |used: &Value| assert!(number(&used["dropped_turns"]) > 2 && used["size"] == 256, "{used}");
    check(&server.post("/v1/messages", body(json!({"messages": messages}))).json()["context_use"]);
    check(&server.post("/api/chat", body(json!({"messages": messages, "stream": false}))).json()["context_use"]);
    let respond =
        |more: Value| server.post("/v1/responses", with(json!({"input": messages, "max_output_tokens": 8}), more));
    let cut = respond(json!({"truncation": "auto"})).json();
    check(&cut["context_use"]);
    assert_eq!(cut["truncation"], "auto");
    assert_eq!(respond(json!({"truncation": "disabled", "context_full": "shift"})).status, 400);
    assert_eq!(respond(json!({})).status, 400);
    // Several answers have it each.
    let several = chat(&server, &messages, json!({"context_full": "drop-turns", "n": 2})).json();
    several["choices"].as_array().unwrap().iter().for_each(|choice| check(&choice["context_use"]));
    server.stop();
    let log = log.join().unwrap();
    let line = log.lines().find(|line| line.contains("generated")).unwrap_or_else(|| panic!("{log}"));
    assert!(
        line.contains("dropped_turns=") && line.contains("shifts=0") && !line.contains("dropped_turns=0"),
        "{line}"
    );
}
