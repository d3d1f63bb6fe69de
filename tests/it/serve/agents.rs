//! What coding agents and other clients send, as they send it: recorded requests, and what they rely on.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::api::{Response, Server};
use super::model_with_template;
use crate::support::fixture;

/// A tiny model with a template for tools, and a context for a whole request.
fn long_model() -> TempDir {
    let folder = model_with_template("hermes");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(16384);
    fs::write(&path, config.to_string()).unwrap();
    folder
}

/// Path and body of a recorded request.
fn recorded(name: &str) -> (String, Value) {
    let text = fs::read_to_string(fixture(&format!("fixtures/agents/{name}.json"))).unwrap();
    let mut request: Value = serde_json::from_str(&text).unwrap();
    (request["path"].as_str().unwrap().to_owned(), request["body"].take())
}

/// The names of all recorded requests.
fn all_recorded() -> Vec<String> {
    let entries = fs::read_dir(fixture("fixtures/agents")).unwrap().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect();
    names.sort();
    names
}

/// Sends a body, for an answer of at most four tokens.
fn ask(server: &Server, path: &str, mut body: Value) -> Response {
    let limit = if path.starts_with("/v1/responses") { "max_output_tokens" } else { "max_tokens" };
    if !path.contains("count_tokens") {
        body[limit] = json!(4);
        body["temperature"] = json!(0);
    }
    server.post(path, body)
}

#[test]
fn recorded_requests_are_answered() {
    let model = long_model();
    let server = Server::start(model.path(), &["--context", "16384"]);
    let names = all_recorded();
    assert!(names.len() >= 14, "{names:?}");
    for name in names {
        let (path, body) = recorded(&name);
        let answer = ask(&server, &path, body);
        assert_eq!(answer.status, 200, "{name}: {}", answer.body);
        let end = match &path {
            path if path.contains("count_tokens") => "\"input_tokens\":",
            path if path.starts_with("/v1/messages") => "event: message_stop",
            path if path.starts_with("/v1/responses") => "event: response.",
            _ => "[DONE]",
        };
        assert!(answer.body.contains(end) && !answer.body.contains("\"error\":{"), "{name}: {}", answer.body);
    }
}

#[test]
fn calls_of_a_namespace_are_answered_with_both_names() {
    let model = long_model();
    let server = Server::start(model.path(), &["--context", "16384"]);
    let (path, mut body) = recorded("codex-1-1");
    let choice = json!({"type": "function", "namespace": "multi_agent_v1", "name": "resume_agent"});
    (body["tool_choice"], body["stream"], body["max_output_tokens"]) = (choice, json!(false), json!(600));
    body["parallel_tool_calls"] = json!(false);
    let answer = server.post(&path, body.clone()).json();
    let calls = |answer: &Value| -> Vec<Value> {
        let items = answer["output"].as_array().unwrap_or_else(|| panic!("{answer}"));
        items.iter().filter(|item| item["type"] == "function_call").cloned().collect()
    };
    let called = calls(&answer);
    let names = |call: &Value| (call["namespace"].clone(), call["name"].clone());
    assert_eq!(
        called.iter().map(names).collect::<Vec<_>>(),
        [(json!("multi_agent_v1"), json!("resume_agent"))],
        "{answer}"
    );
    body["stream"] = json!(true);
    let streamed = server.post(&path, body).body;
    assert!(
        streamed.contains("\"namespace\":\"multi_agent_v1\"") && !streamed.contains("multi_agent_v1__"),
        "{streamed}"
    );
}

#[test]
fn an_answer_goes_on_where_the_request_has_begun_it() {
    let server = Server::start(&fixture("golden/olmoe"), &["--context", "256"]);
    let user = json!({"role": "user", "content": "Tell me."});
    let prompt = server.post("/apply-template", json!({"messages": [user]})).json()["prompt"].clone();
    let begun = "Once upon a";
    let body = json!({"prompt": format!("{}{begun}", prompt.as_str().unwrap()), "max_tokens": 8, "temperature": 0});
    let want = server.post("/v1/completions", body).json();
    for content in [json!(begun), json!([{"type": "text", "text": begun}])] {
        let messages = json!([user, {"role": "assistant", "content": content}]);
        let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
        let answer = server.post("/v1/messages", body.clone()).json();
        assert_eq!(answer["content"][0]["text"], want["choices"][0]["text"], "{answer}");
        assert_eq!(answer["usage"]["output_tokens"], want["usage"]["completion_tokens"]);
        let mut chat = body;
        chat["continue_final_message"] = json!(true);
        let answer = server.post("/v1/chat/completions", chat).json();
        assert_eq!(answer["choices"][0]["message"]["content"], want["choices"][0]["text"], "{answer}");
    }
    let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
    let unanswered = json!({"messages": [user, {"role": "assistant", "content": call}], "max_tokens": 4});
    assert_eq!(server.post("/v1/messages", unanswered).status, 400);
}

#[test]
fn the_only_model_answers_to_any_name() {
    let any = Server::start(&fixture("../models/demo"), &["--context", "128"]);
    let strict = Server::start(&fixture("../models/demo"), &["--context", "128", "--strict-model"]);
    let user = json!([{"role": "user", "content": "hi"}]);
    for model in ["claude-opus-4-8", ""] {
        for (path, body) in [
            ("/v1/chat/completions", json!({"messages": user, "max_tokens": 2})),
            ("/v1/messages", json!({"messages": user, "max_tokens": 2})),
            ("/v1/responses", json!({"input": "hi", "max_output_tokens": 2})),
            ("/v1/completions", json!({"prompt": "hi", "max_tokens": 2})),
            ("/api/chat", json!({"messages": user, "stream": false, "options": {"num_predict": 2}})),
            ("/v1/messages/count_tokens", json!({"messages": user})),
        ] {
            let mut body = body;
            body["model"] = json!(model);
            let answer = any.post(path, body.clone());
            assert_eq!(answer.status, 200, "{path}: {}", answer.body);
            assert!(path.ends_with("count_tokens") || answer.json()["model"] == "demo", "{path}: {}", answer.body);
            assert_eq!(strict.post(path, body).status, if model.is_empty() { 200 } else { 404 }, "{path}");
        }
    }
    assert_eq!(any.get("/v1/models/claude-opus-4-8").status, 404);
}

#[test]
fn a_model_without_a_format_of_calls_has_a_generic_one() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "512"]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "roll", "parameters": schema}});
    let ask = |choice: &str, messages: Value| {
        let body = json!({"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 120, "seed": 3,
            "parallel_tool_calls": false});
        let answer = server.post("/v1/chat/completions", body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0].clone()
    };
    let user = json!({"role": "user", "content": "Roll."});
    let forced = ask("required", json!([user]));
    let call = &forced["message"]["tool_calls"][0];
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(call["function"]["name"] == "roll" && arguments["n"].is_u64(), "{forced}");
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "six"});
    ask("auto", json!([user, forced["message"], result]));
    let rendered =
        server.post("/apply-template", json!({"messages": [user, forced["message"], result], "tools": [tool]}));
    let prompt = rendered.json()["prompt"].as_str().unwrap().to_owned();
    let parts = ["\"name\":\"roll\"", "\n\nRoll.", "<tool_call>", "<tool_response>\nsix\n</tool_response>"];
    assert!(parts.iter().all(|part| prompt.contains(part)), "{prompt}");
}

#[test]
fn what_has_no_effect_is_logged_once_and_errors_always() {
    let (server, log) = Server::start_logged(&fixture("../models/demo"), &["--context", "128", "--log-level", "info"]);
    let long = "y".repeat(3_000);
    for _ in 0..2 {
        for path in ["/v1/chat/completions", "/v1/messages"] {
            let body = json!({
                "messages": [{"role": "user", "content": "secret question"}], "max_tokens": 1, "diagnostics": 1, "user": "u",
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            });
            assert_eq!(server.post(path, body).status, 200, "{path}");
        }
        let body = json!({"messages": [{"role": "user", "content": "secret question"}, {"role": long, "content": ""}]});
        assert_eq!(server.post("/v1/chat/completions", body).status, 400);
    }
    drop(server);
    let log = log.join().unwrap();
    let count = |part: &str| log.matches(part).count();
    assert_eq!(count("the field 'diagnostics' is not known and has no effect"), 1, "{log}");
    assert_eq!(count("tools of the type 'web_search_20250305' are not offered"), 1, "{log}");
    assert_eq!(count("'user'"), 0, "{log}");
    assert_eq!(count("Invalid value for 'messages[1].role'"), 2, "{log}");
    assert!(count(&"y".repeat(201)) == 0 && count("secret question") == 0, "{log}");
}

#[test]
fn routes_of_other_servers_are_there() {
    let server = Server::start(&fixture("../models/demo"), &["--context", "128"]);
    assert_eq!(server.get("/v1/health").json()["status"], "ok");
    let text = json!({"prompt": "Once upon a", "max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let want = server.post("/v1/completions", text).json();
    let body =
        json!({"prompt": "Once upon a", "n_predict": 6, "temperature": 0, "ignore_eos": true, "cache_prompt": true});
    let whole = server.post("/completion", body.clone()).json();
    assert_eq!((&whole["content"], &whole["stop_type"]), (&want["choices"][0]["text"], &json!("limit")), "{whole}");
    assert_eq!((&whole["tokens_predicted"], &whole["tokens_evaluated"]), (&json!(6), &want["usage"]["prompt_tokens"]));
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.post("/completion", streamed).body;
    let events: Vec<Value> =
        events.split("\n\n").filter_map(|frame| serde_json::from_str(frame.strip_prefix("data: ")?).ok()).collect();
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!((json!(text), &events.last().unwrap()["stop"]), (whole["content"].clone(), &json!(true)));
    let asked = json!({"input": "Is it?", "instructions": "Be brief."});
    let counted = server.post("/v1/responses/input_tokens", asked.clone()).json();
    let mut asked = asked;
    asked["max_output_tokens"] = json!(1);
    assert_eq!(
        counted["input_tokens"],
        server.post("/v1/responses", asked).json()["usage"]["input_tokens"],
        "{counted}"
    );
    let shown = server.post("/api/show", json!({"model": "demo"})).json();
    let (details, info) = (&shown["details"], &shown["model_info"]);
    assert_eq!((&details["family"], &info["olmoe.context_length"]), (&json!("olmoe"), &json!(128)), "{shown}");
    assert!(
        details["parameter_size"].as_str().unwrap().ends_with('M') && details["quantization_level"] == "Q8_0",
        "{shown}"
    );
    let version = server.get("/api/version").json()["version"].as_str().unwrap().to_owned();
    let parts: Vec<u32> = version.split('.').map(|part| part.parse().unwrap()).collect();
    assert!(parts.as_slice() >= [0, 6, 4].as_slice(), "clients ask for 0.6.4 at least: {version}");
}

/// An answer of `/v1/messages` to this system text and question: tokens of the prompt, and those from the cache.
fn prompt_and_cached(server: &Server, system: &str, question: &str) -> [u64; 2] {
    let messages = json!([{"role": "user", "content": question}]);
    let body = json!({"system": system, "messages": messages, "max_tokens": 4, "temperature": 0});
    let usage = server.post("/v1/messages", body).json()["usage"].clone();
    let [new, cached] = ["input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap());
    [new + cached, cached]
}

#[test]
fn a_line_that_changes_with_each_request_leaves_the_prompt_cached() {
    let model = long_model();
    let server = Server::start(model.path(), &["--context", "2048"]);
    let system = |number: usize| {
        let line = format!("x-anthropic-billing-header: cc_version=2.1.197; cch={number:05x};");
        format!("{line}\nYou answer questions about a kitchen. {}", "Be brief. ".repeat(20))
    };
    let [alone, _] = prompt_and_cached(&server, &system(0)[system(0).find('\n').unwrap() + 1..], "What is a larder?");
    let count = |system: String| {
        let body = json!({"system": system, "messages": [{"role": "user", "content": "What is a larder?"}]});
        server.post("/v1/messages/count_tokens", body).json()["input_tokens"].as_u64().unwrap()
    };
    assert_eq!((count(system(1)), count(system(2))), (alone, alone), "the line is not in the prompt");
    let [all, cached] = prompt_and_cached(&server, &system(3), "What is a larder?");
    assert_eq!([all, cached], [alone, alone - 1]);

    let keeping = Server::start(model.path(), &["--context", "2048", "--keep-client-lines"]);
    prompt_and_cached(&keeping, &system(0), "What is a larder?");
    let [all, cached] = prompt_and_cached(&keeping, &system(1), "What is a larder?");
    assert!(all > alone && 2 * cached < all, "{cached} of {all}");
}

#[test]
fn a_side_request_takes_nothing_from_the_conversation() {
    let model = long_model();
    let server = Server::start(model.path(), &["--context", "2048", "--parallel", "3"]);
    let system = format!("You answer questions about a kitchen. {}", "Be brief. ".repeat(20));
    let long = "Tell me of the larder, the cellar and the attic. ".repeat(10);
    let [whole, _] = prompt_and_cached(&server, &system, &long);
    // It has the system text in common, more than half of itself.
    let [side, cached] = prompt_and_cached(&server, &system, "Find a title.");
    assert!(2 * cached > side && cached < side, "{cached} of {side}");
    for turn in 1..4 {
        let [all, cached] = prompt_and_cached(&server, &system, &format!("{long}{}", "And then? ".repeat(turn)));
        assert!(cached + 16 > whole && all > whole, "turn {turn}: {cached} of {all}, {whole} before");
        let [all, cached] = prompt_and_cached(&server, &system, &format!("Find a title. {turn}"));
        assert!(all - cached < 16, "side request {turn}: {cached} of {all}");
    }
}
