//! Conversations of agents: what a later prompt has in common with earlier ones is not computed again, also by models
//! whose states and windows cannot go back by themselves, and changes no bit.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::api::Server;
use crate::support::fixture;

/// Models by what they keep of a sequence: recurrent states, windows, all rows. With the marks of turns that they have.
const MODELS: [(&str, [&str; 2]); 3] = [
    ("qwen3_next", ["<|im_start|>", "<|im_end|>"]),
    ("gpt_oss", ["<|start|>", "<|end|>"]),
    ("olmoe", ["<|im_start|>", "<|im_end|>"]),
];

fn agent_model(name: &str, [begin, end]: [&str; 2]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("golden").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let template = fs::read_to_string(fixture("templates/hermes.jinja")).unwrap();
    let template = template.replace("<|im_start|>", begin).replace("<|im_end|>", end);
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(32768);
    fs::write(&path, config.to_string()).unwrap();
    folder
}

fn words(subject: &str, count: usize) -> String {
    (0..count).map(|i| format!("{subject} {i} has bread and fish. ")).collect()
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {
        "name": name, "description": words(name, 12), "parameters": {"type": "object", "properties": {}},
    }})
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// An agent's requests, in order.
fn session(subject: &str) -> Vec<Value> {
    let tools = json!([tool("read"), tool("write"), tool("search")]);
    let body = |messages: &[Value]| {
        let sampling = json!({"max_tokens": 4, "temperature": 0, "logprobs": true, "top_logprobs": 2});
        let mut body = json!({"messages": messages, "tools": tools});
        body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        body
    };
    let call = json!({"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}},
    ]});
    let mut messages = vec![message("system", &words("The cook", 20)), message("user", &words(subject, 10))];
    let mut requests = vec![body(&messages)];
    // A title, by other instructions and without tools.
    let title = [message("system", "Name the text."), message("user", &words(subject, 10))];
    requests.push(json!({"messages": title, "max_tokens": 4, "temperature": 0, "logprobs": true, "top_logprobs": 2}));
    for turn in 0..3 {
        messages.extend([
            call.clone(),
            json!({"role": "tool", "tool_call_id": "c1", "content": words("A loaf", 5 + turn)}),
        ]);
        requests.push(body(&messages));
    }
    messages.extend([message("assistant", "It is done."), message("user", "And the next one?")]);
    requests.push(body(&messages));
    // The last question in other words.
    messages.pop();
    messages.push(message("user", &words("Another", 3)));
    requests.push(body(&messages));
    // A new conversation in the same folder.
    requests.push(body(&[messages[0].clone(), message("user", "Does it rise?")]));
    requests
}

fn tokens_of(server: &Server, request: &Value) -> Vec<Value> {
    let prompt = server.post("/apply-template", request.clone()).json()["prompt"].take();
    server.post("/tokenize", json!({"content": prompt, "parse_special": true})).json()["tokens"]
        .as_array()
        .unwrap()
        .clone()
}

/// Sends requests one after the other, and compares what was cached with what an unbounded cache had.
fn replay(name: &str, server: &Server, requests: &[Value]) -> Vec<Value> {
    let (mut earlier, mut answers): (Vec<Vec<Value>>, Vec<Value>) = (Vec::new(), Vec::new());
    for (i, request) in requests.iter().enumerate() {
        let tokens = tokens_of(server, request);
        let common = |other: &Vec<Value>| other.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let reusable = earlier.iter().map(common).max().unwrap_or(0).min(tokens.len() - 1);
        let answer = server.post("/v1/chat/completions", request.clone()).json();
        let details = &answer["usage"]["prompt_tokens_details"];
        let cached = details["cached_tokens"].as_u64().unwrap() as usize;
        assert_eq!(answer["usage"]["prompt_tokens"], tokens.len(), "{name}, request {i}");
        // The templates' marks before an answer are a few tokens; side requests may differ within tools.
        assert!(cached + 16 >= reusable, "{name}, request {i}: {cached} of {reusable} tokens; {details}");
        let tells = details["cache_miss_reason"].is_string();
        assert_eq!(tells, i > 0 && tokens.len() - cached >= 64, "{name}, request {i}: {answer}");
        earlier.push(tokens);
        answers.push(answer["choices"].clone());
    }
    answers
}

#[test]
fn an_agent_stays_warm_and_its_answers_are_those_of_a_cold_server() {
    for (name, marks) in MODELS {
        let model = agent_model(name, marks);
        let server = Server::start(model.path(), &["--context", "16384"]);
        let requests = session("The baker");
        let warm = replay(name, &server, &requests);
        for (i, request) in requests.iter().enumerate().skip(2) {
            let cold = Server::start(model.path(), &["--context", "16384"]);
            let answer = cold.post("/v1/chat/completions", request.clone()).json();
            assert_eq!(answer["choices"], warm[i], "{name}, request {i}");
        }
    }
}

#[test]
fn interleaved_agents_keep_their_prefixes() {
    for (name, marks) in MODELS {
        let model = agent_model(name, marks);
        let server = Server::start(model.path(), &["--context", "16384"]);
        let [first, second] = ["The baker", "A fisher"].map(session);
        let both: Vec<Value> = first.into_iter().zip(second).flat_map(|(a, b)| [a, b]).collect();
        replay(name, &server, &both);
    }
}

#[test]
fn eight_answers_to_a_prompt_compute_it_once() {
    for (name, marks) in MODELS {
        let model = agent_model(name, marks);
        let server = Server::start(model.path(), &["--context", "16384", "--parallel", "8"]);
        let messages = [message("user", &words("The miller", 160))];
        let body =
            json!({"messages": messages, "n": 8, "max_tokens": 4, "temperature": 1, "seed": 7, "ignore_eos": true});
        let answer = server.post("/v1/chat/completions", body.clone()).json();
        let tokens = answer["usage"]["prompt_tokens"].as_f64().unwrap();
        let computed = server.metric("larder_prompt_tokens_total");
        assert!(tokens > 2000.0 && computed <= tokens + 8.0 * 64.0, "{name}: {computed} for {tokens} tokens");
        let alone = Server::start(model.path(), &["--context", "16384", "--parallel", "1"]);
        assert_eq!(alone.post("/v1/chat/completions", body).json()["choices"], answer["choices"], "{name}");
    }
}

#[test]
fn requests_that_come_together_compute_their_common_beginning_once() {
    let (name, marks) = MODELS[0];
    let model = agent_model(name, marks);
    let server = Server::start(model.path(), &["--context", "16384"]);
    let system = message("system", &words("The cook", 160));
    let body = |i: usize| {
        let messages = [system.clone(), message("user", &format!("Question {i}?"))];
        json!({"messages": messages, "max_tokens": 4, "temperature": 0})
    };
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..4)
            .map(|i| {
                scope.spawn({
                    let (server, body) = (&server, body(i));
                    move || server.post("/v1/chat/completions", body).json()
                })
            })
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let tokens = answers[0]["usage"]["prompt_tokens"].as_f64().unwrap();
    let computed = server.metric("larder_prompt_tokens_total");
    assert!(tokens > 2000.0 && computed < tokens + 4.0 * 64.0, "{computed} for {tokens} tokens");
    let cold = Server::start(model.path(), &["--context", "16384"]);
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(cold.post("/v1/chat/completions", body(i)).json()["choices"], answer["choices"]);
    }
}
