//! Conversations of agents: what a later prompt has in common with earlier ones is not computed again, also by models
//! whose states and windows cannot go back by themselves, and changes no bit.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::api::Server;
use crate::support::{fixture, golden_models};

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

#[test]
fn a_miss_names_the_block_where_prompts_differ() {
    let (name, marks) = MODELS[2];
    let model = agent_model(name, marks);
    let server = Server::start(model.path(), &["--context", "16384"]);
    let reason = |system: &str, last_tool: Value, question: &str| {
        let body = json!({
            "messages": [message("system", &words(system, 20)), message("user", &words(question, 20))],
            "tools": [tool("read"), last_tool], "max_tokens": 1,
        });
        let usage = server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens_details"].take();
        usage["cache_miss_reason"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(reason("The cook", tool("write"), "The baker"), "");
    for (said, block) in [
        (reason("The cook", tool("write"), "A fisher"), ", in turn 1"),
        (reason("The cook", tool("search"), "A fisher"), ", in the tools"),
        (reason("A miller", tool("search"), "A fisher"), ", in the system text"),
    ] {
        assert!(said.starts_with("the prompt differs from token ") && said.ends_with(block), "{said}");
    }
}

/// Requests whose prompts begin alike or do not, with all that an answer may be asked for.
fn mixed_requests(count: u32) -> Vec<Value> {
    let ids =
        |text: u32, length: u32| -> Vec<u32> { (0..length).map(|i| 3 + (text * 31 + i * 7 + i * i) % 90).collect() };
    let request = |i: u32| {
        let shared = ids(i % 3, [20, 70, 130, 200][i as usize / 3 % 4]);
        let prompt = [shared, ids(i / 2 + 5, i * 11 % 40 + 1)].concat();
        let mut body = json!({
            "prompt": prompt, "max_tokens": 1 + i % 9, "temperature": f64::from(i % 2), "seed": i, "logprobs": 3,
            "ignore_eos": true, "n": 1 + u32::from(i.is_multiple_of(11)), "echo": i.is_multiple_of(13),
        });
        if i.is_multiple_of(5) {
            body["frequency_penalty"] = json!(0.5);
        }
        body
    };
    (0..count).map(request).collect()
}

/// Answers without what they repeat of the prompt: texts, tokens and their probabilities.
fn answered(choices: &Value, tokens: u64) -> Vec<Value> {
    let last = |list: &Value| {
        let list = list.as_array().unwrap();
        list[list.len() - tokens as usize..].to_vec()
    };
    let choice = |choice: &Value| {
        let said = &choice["logprobs"];
        let said = ["tokens", "token_logprobs", "top_logprobs"].map(|key| last(&said[key]));
        json!([choice["finish_reason"], said])
    };
    choices.as_array().unwrap().iter().map(choice).collect()
}

#[test]
fn mixed_requests_have_the_answers_of_requests_alone() {
    for model in golden_models() {
        let requests = mixed_requests(64);
        let server = |parallel| Server::start(&model, &["--context", "384", "--parallel", parallel, "--queue", "64"]);
        let together = server("8");
        let answers: Vec<Value> = std::thread::scope(|scope| {
            let ask = |body: &Value| {
                let (server, body) = (&together, body.clone());
                scope.spawn(move || server.post("/v1/completions", body).json())
            };
            let asked: Vec<_> = requests.iter().map(ask).collect();
            asked.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        let alone = server("1");
        for (i, (mut body, answer)) in requests.into_iter().zip(answers).enumerate() {
            let tokens = body["max_tokens"].as_u64().unwrap();
            // The probabilities of a prompt are computed without a cache.
            body["echo"] = json!(true);
            let cold = alone.post("/v1/completions", body).json();
            let [answer, cold] = [answer, cold].map(|answer| answered(&answer["choices"], tokens));
            assert!(answer == cold, "{}, request {i}: {answer:?}, alone {cold:?}", model.display());
        }
        assert!(together.metric("larder_remembered_tokens_total") > 0.0);
    }
}
