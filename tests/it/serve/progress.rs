//! Streams that tell how much of their prompt is computed, in the form of llama.cpp's server.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use super::api::{Response, Server};
use crate::support::fixture;

/// Tokens of a step.
const CHUNK: u64 = 32;
const PROMPT: u64 = 200;

fn server(flags: &[&str]) -> Server {
    let chunk = format!("prefill-tokens={CHUNK}");
    let all = [&["--context", "512", "-o", &chunk], flags].concat();
    Server::start(&fixture("../models/demo"), &all)
}

/// A streamed request for four tokens behind a prompt that is told by `salt` from others.
fn asked(salt: u64, more: Value) -> Value {
    let prompt: Vec<u64> = (0..PROMPT).map(|i| (i * 7 + salt) % 97 + 3).collect();
    let mut body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "stream": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The data of all events of a stream but its end.
fn events(answer: &Response) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let data = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// The events that tell of the prompt, which come before all others.
fn of_prompt(events: &[Value]) -> &[Value] {
    let count = events.iter().take_while(|event| event["prompt_progress"].is_object()).count();
    assert!(events[count..].iter().all(|event| event.get("prompt_progress").is_none()), "{events:?}");
    &events[..count]
}

fn number(event: &Value, field: &str) -> u64 {
    event["prompt_progress"][field].as_u64().unwrap_or_else(|| panic!("{event}"))
}

/// Checks the numbers of the events of a prompt, and returns how many there are.
fn check(told: &[Value]) -> usize {
    let cached = number(&told[0], "cache");
    let processed: Vec<u64> = told.iter().map(|event| number(event, "processed")).collect();
    assert!(processed.is_sorted_by(|a, b| a < b), "{processed:?}");
    assert_eq!(processed.first(), Some(&cached), "{processed:?}");
    let total = number(told.last().unwrap(), "total");
    assert_eq!(processed.last(), Some(&total));
    for end in (cached..total).step_by(CHUNK as usize) {
        assert!(processed.contains(&end), "{end} in {processed:?}");
    }
    for event in told {
        assert_eq!((number(event, "total"), number(event, "cache")), (total, cached), "{event}");
        assert_eq!(event["prompt_progress"].as_object().unwrap().len(), 4, "{event}");
    }
    assert!(told.iter().map(|event| number(event, "time_ms")).is_sorted(), "{told:?}");
    told.len()
}

#[test]
fn events_grow_from_the_prefix_cache_to_the_whole_prompt() {
    let server = server(&[]);
    let ask = |more: Value| server.post("/v1/completions", asked(0, more));
    let told = events(&ask(json!({"return_progress": true})));
    let prompt = of_prompt(&told);
    assert!(check(prompt) > (PROMPT / CHUNK) as usize, "{prompt:?}");
    assert_eq!((number(&prompt[0], "total"), number(&prompt[0], "cache")), (PROMPT, 0));
    for event in prompt {
        assert_eq!((&event["object"], &event["choices"][0]["text"]), (&json!("text_completion"), &json!("")));
    }
    // The last token is always computed.
    let again = events(&ask(json!({"return_progress": true})));
    assert_eq!((check(of_prompt(&again)), number(&again[0], "cache")), (2, PROMPT - 1), "{again:?}");
    let text = |events: &[Value]| -> String {
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    let untold = events(&ask(json!({})));
    assert_eq!((text(&told), text(&again)), (text(&untold), text(&untold)));
}

#[test]
fn events_are_only_for_streams_that_ask_for_them() {
    let server = server(&[]);
    for more in [json!({}), json!({"return_progress": false}), json!({"return_progress": null})] {
        assert!(of_prompt(&events(&server.post("/v1/completions", asked(1, more)))).is_empty());
    }
    let whole = server.post("/v1/completions", asked(1, json!({"return_progress": true, "stream": false}))).json();
    assert!(whole["choices"].is_array() && whole.get("prompt_progress").is_none(), "{whole}");
    let wrong = server.post("/v1/completions", asked(1, json!({"return_progress": 1})));
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("return_progress")));
}

#[test]
fn each_api_that_has_them_has_its_form() {
    let server = server(&[]);
    let text = "The old man and the sea, and the old house on the hill. ".repeat(8);
    let messages = json!([{"role": "user", "content": text}]);
    let told = |path: &str, more: Value| {
        let mut body = json!({"stream": true, "return_progress": true, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        events(&server.post(path, body))
    };
    let chat = told("/v1/chat/completions", json!({"messages": messages, "max_tokens": 4}));
    assert!(check(of_prompt(&chat)) > 3, "{chat:?}");
    for event in of_prompt(&chat) {
        assert_eq!(event["choices"][0]["delta"], json!({"role": "assistant", "content": null}));
    }
    let completion = events(&server.post("/completion", asked(2, json!({"return_progress": true}))));
    assert!(check(of_prompt(&completion)) > 3, "{completion:?}");
    for event in of_prompt(&completion) {
        assert_eq!((&event["content"], &event["stop"]), (&json!(""), &json!(false)));
    }
    // The first event that tells of the prompt is one of the two with which a response begins.
    let input = format!("Once upon a time: {text}");
    let response = told("/v1/responses", json!({"input": input, "max_output_tokens": 16}));
    assert_eq!(response[0]["type"], "response.created");
    let prompt = of_prompt(&response[1..]);
    assert!(check(prompt) > 3 && prompt.iter().all(|event| event["type"] == "response.in_progress"));
    assert!(response.iter().enumerate().all(|(i, event)| event["sequence_number"] == i), "{response:?}");
    assert_eq!(response.iter().filter(|event| event["type"] == "response.created").count(), 1);
    // These have no such events.
    let others = told("/v1/messages", json!({"messages": messages, "max_tokens": 4}));
    assert!(of_prompt(&others).is_empty(), "{others:?}");
}

#[test]
fn prompts_beside_other_requests_are_told_apart() {
    let server = server(&["--parallel", "3"]);
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..3)
            .map(|i| {
                let server = &server;
                scope.spawn(move || {
                    // Prompts join a request that decodes.
                    sleep(Duration::from_millis(50 * i));
                    let more = json!({"return_progress": true, "max_tokens": 60});
                    events(&server.post("/v1/completions", asked(10 * i, more)))
                })
            })
            .collect();
        for told in asking.into_iter().map(|thread| thread.join().unwrap()) {
            let processed: Vec<u64> = of_prompt(&told).iter().map(|event| number(event, "processed")).collect();
            assert!(processed.is_sorted_by(|a, b| a < b), "{processed:?}");
            assert_eq!((processed.first(), processed.last()), (Some(&0), Some(&PROMPT)), "{processed:?}");
        }
    });
}
