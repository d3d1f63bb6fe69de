//! OpenAI's Responses, Anthropic's Messages and Ollama's API, on the same engine as OpenAI's chats.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::api::{Response, Server};
use super::model_with_template;
use crate::support::fixture;

fn demo() -> PathBuf {
    fixture("../models/demo")
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

/// A body with further fields.
fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The data of the events of a stream; each has its name as `type`.
fn events(response: &Response) -> Vec<Value> {
    assert!(response.head.contains("text/event-stream"), "{}", response.head);
    let frames = response.body.split("\n\n").filter(|frame| frame.starts_with("event: "));
    let event = |frame: &str| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    frames.map(event).collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    names
}

fn lines(response: &Response) -> Vec<Value> {
    assert!(response.head.contains("application/x-ndjson"), "{}", response.head);
    response.body.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The answer of `/v1/chat/completions` to the same messages, 12 tokens at most.
fn chat_answer(server: &Server, messages: &Value) -> String {
    let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
    let answer = server.post("/v1/chat/completions", body).json();
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

#[test]
fn responses_are_whole_and_streamed() {
    for model in [demo(), fixture("golden/olmoe")] {
        let server = Server::start(&model, &["--context", "256"]);
        let body = json!({
            "input": "Tell me about the old house.", "instructions": "Be brief.", "max_output_tokens": 12,
            "temperature": 0, "metadata": {"a": "b"}, "store": true,
        });
        let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": body["input"]}]);
        let want = chat_answer(&server, &messages);
        let whole = server.post("/v1/responses", body.clone()).json();
        assert_eq!(whole["output"][0]["content"][0]["text"], want.as_str(), "{whole}");
        let is_cut = whole["usage"]["output_tokens"] == 12;
        assert_eq!(whole["status"], if is_cut { "incomplete" } else { "completed" });
        if is_cut {
            assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
        }
        assert_eq!((&whole["metadata"], &whole["instructions"]), (&json!({"a": "b"}), &json!("Be brief.")));
        let usage = &whole["usage"];
        assert!(usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{usage}");
        assert_eq!(
            usage["total_tokens"].as_u64().unwrap(),
            usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap()
        );

        let events = events(&server.post("/responses", with(body, json!({"stream": true}))));
        let last = if is_cut { "response.incomplete" } else { "response.completed" };
        let order = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            last,
        ];
        assert_eq!(names(&events), order);
        assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
        let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
        assert_eq!(text, want);
        let response = &events.last().unwrap()["response"];
        assert_eq!(response["output"][0]["content"], whole["output"][0]["content"]);
        assert_eq!(response["usage"]["output_tokens"], usage["output_tokens"]);
        let item = &events[events.len() - 2]["item"];
        assert_eq!(item, &response["output"][0]);
    }
}

#[test]
fn responses_have_formats_and_refuse_by_name() {
    let server = Server::start(&demo(), &["--context", "256"]);
    let schema = json!({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
        "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "name": "s", "schema": schema}});
    let answer = server.post("/v1/responses", json!({"input": "Is it?", "text": format, "temperature": 0})).json();
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(serde_json::from_str::<Value>(text).unwrap()["yes"].is_boolean(), "{answer}");
    assert_eq!(answer["status"], "completed");
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
    ] {
        let refused = server.post("/v1/responses", with(json!({"input": "x"}), more));
        let error = &refused.json()["error"];
        assert_eq!((refused.status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
}

#[test]
fn messages_are_whole_and_streamed_and_counted() {
    for model in [demo(), fixture("golden/olmoe")] {
        let server = Server::start(&model, &["--context", "256"]);
        let messages = user("Tell me about the old house.");
        let count = server.post("/v1/messages/count_tokens", json!({"messages": messages})).json();
        let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
        let whole = server.post("/v1/messages", body.clone()).json();
        assert_eq!(whole["usage"]["input_tokens"], count["input_tokens"], "{whole}");
        assert_eq!(whole["usage"]["cache_read_input_tokens"], 0);
        let want = chat_answer(&server, &messages);
        assert_eq!(whole["content"], json!([{"type": "text", "text": want}]));
        let is_cut = whole["usage"]["output_tokens"] == 12;
        assert_eq!(whole["stop_reason"], if is_cut { "max_tokens" } else { "end_turn" }, "{whole}");

        let events = events(&server.post("/v1/messages", with(body, json!({"stream": true}))));
        let order = [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ];
        assert_eq!(names(&events), order);
        let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
        assert_eq!(text, want);
        let last = &events[events.len() - 2];
        assert_eq!(last["delta"]["stop_reason"], whole["stop_reason"]);
        let tokens = |name: &str| last["usage"][name].as_u64().unwrap();
        assert!(tokens("cache_read_input_tokens") > 0, "{last}");
        assert_eq!(tokens("input_tokens") + tokens("cache_read_input_tokens"), count["input_tokens"].as_u64().unwrap());
    }
}

#[test]
fn the_stop_sequence_that_ended_the_text_is_told() {
    let server = Server::start(&demo(), &["--context", "256"]);
    let messages = user("Tell me about the old house.");
    let whole = chat_answer(&server, &messages);
    let stop: String = whole.chars().skip(whole.chars().count() / 2).take(3).collect();
    let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0, "stop_sequences": ["\u{2603}", stop]});
    let cut = server.post("/v1/messages", body.clone()).json();
    assert_eq!((&cut["stop_reason"], &cut["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)), "{cut}");
    let text = cut["content"][0]["text"].as_str().unwrap();
    assert_eq!(text, &whole[..whole.find(&stop).unwrap()]);
    let events = events(&server.post("/v1/messages", with(body, json!({"stream": true}))));
    assert_eq!(events[events.len() - 2]["delta"], json!({"stop_reason": "stop_sequence", "stop_sequence": stop}));
}

#[test]
fn errors_have_the_form_of_their_api() {
    let server = Server::start(&demo(), &["--context", "64", "--api-key", "bread", "--strict-model"]);
    let key = "x-api-key: bread\r\n";
    let post = |path: &str, body: Value| server.send("POST", path, key, body.to_string().as_bytes());
    let other = json!({"model": "other", "max_tokens": 5, "messages": user("x"), "prompt": "x"});
    for (refused, status, kind) in [
        (server.post("/v1/messages", other.clone()), 401, "authentication_error"),
        (post("/v1/messages", other.clone()), 404, "not_found_error"),
        (post("/v1/messages", json!({"messages": user("x")})), 400, "invalid_request_error"),
        (post("/v1/messages/batches", json!({})), 404, "not_found_error"),
        (server.send("GET", "/v1/messages", key, b""), 405, "invalid_request_error"),
    ] {
        let error = refused.json();
        assert_eq!((refused.status, error["type"].as_str()), (status, Some("error")), "{error}");
        assert_eq!(error["error"]["type"], kind, "{error}");
        assert!(error["error"]["message"].is_string());
    }
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let refused = post("/v1/messages", json!({"max_tokens": 5, "messages": image})).json();
    assert!(refused["error"]["message"].as_str().unwrap().contains("messages[0].content[0]"), "{refused}");
    for (refused, status) in [
        (server.get("/api/tags"), 401),
        (post("/api/chat", other.clone()), 404),
        (post("/api/generate", other), 404),
        (post("/api/chat", json!({"messages": user(&"house ".repeat(100))})), 400),
        (post("/api/generate", json!({"prompt": "x", "suffix": "y"})), 400),
        (post("/api/show", json!({"model": "other"})), 404),
        (post("/api/pull", json!({"model": "other"})), 404),
    ] {
        assert_eq!(refused.status, status, "{}", refused.body);
        assert!(refused.json()["error"].is_string(), "{}", refused.body);
    }
}

#[test]
fn lines_of_ollama_are_the_chats_answer() {
    for model in [demo(), fixture("golden/olmoe")] {
        let server = Server::start(&model, &["--context", "256"]);
        let messages = user("Tell me about the old house.");
        let want = chat_answer(&server, &messages);
        let name = server.get("/api/tags").json()["models"][0]["name"].as_str().unwrap().to_owned();
        let body = json!({
            "model": format!("{name}:latest"), "messages": messages, "options": {"num_predict": 12, "temperature": 0},
        });
        let streamed = lines(&server.post("/api/chat", body.clone()));
        let text: String = streamed.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
        assert_eq!(text, want);
        let (last, before) = streamed.split_last().unwrap();
        assert!(last["done"] == true && before.iter().all(|line| line["done"] == false), "{last}");
        let whole = server.post("/api/chat", with(body.clone(), json!({"stream": false}))).json();
        assert_eq!((&whole["message"]["content"], &whole["done"]), (&json!(want), &json!(true)));
        for field in ["done_reason", "prompt_eval_count", "eval_count"] {
            assert_eq!(whole[field], last[field], "{field}");
        }
        assert_eq!(whole["done_reason"], if whole["eval_count"] == 12 { "length" } else { "stop" });
        let count = server.post("/v1/messages/count_tokens", json!({"messages": messages})).json();
        assert_eq!(whole["prompt_eval_count"], count["input_tokens"]);
        assert!(whole["total_duration"].as_u64().unwrap() >= whole["eval_duration"].as_u64().unwrap());
        assert!(whole["created_at"].as_str().is_some_and(|at| at.starts_with("20") && at.ends_with('Z')), "{whole}");

        let options = body["options"].clone();
        let prompt = json!({"prompt": "Tell me about the old house.", "options": options, "stream": false});
        let generated = server.post("/api/generate", prompt.clone()).json();
        assert_eq!(generated["response"], want, "{generated}");
        let raw = with(prompt, json!({"raw": true}));
        let body = json!({"prompt": raw["prompt"], "max_tokens": 12, "temperature": 0});
        let completed = server.post("/v1/completions", body).json();
        assert_eq!(server.post("/api/generate", raw).json()["response"], completed["choices"][0]["text"]);
        let shown = server.post("/api/show", json!({"model": name})).json();
        assert_eq!(shown["model_info"]["olmoe.context_length"], 256, "{shown}");
        assert_eq!(server.get("/api/ps").json()["models"][0]["model"], name.as_str());
    }
}

#[test]
fn ollamas_requests_without_a_prompt_load_the_model() {
    let server = Server::start(&demo(), &["--context", "64"]);
    for (path, body, reason) in [
        ("/api/generate", json!({}), "load"),
        ("/api/generate", json!({"model": "demo", "prompt": "", "keep_alive": "5m"}), "load"),
        ("/api/generate", json!({"keep_alive": 0}), "unload"),
        ("/api/chat", json!({"messages": [], "keep_alive": "0s"}), "unload"),
        ("/api/chat", json!({"model": "demo:latest"}), "load"),
    ] {
        let answer = server.post(path, body).json();
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!(reason)), "{answer}");
        let text = if path == "/api/chat" { &answer["message"]["content"] } else { &answer["response"] };
        assert_eq!(text, "", "{answer}");
    }
}

#[test]
fn ollamas_format_is_a_schema_or_json() {
    let server = Server::start(&demo(), &["--context", "256"]);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"], "additionalProperties": false});
    let body = json!({"messages": user("How many?"), "format": schema, "stream": false, "options": {"seed": 3}});
    let answer = server.post("/api/chat", body).json();
    let object: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(object["n"].as_u64().is_some_and(|n| n <= 9), "{answer}");
}

#[test]
fn calls_of_tools_go_out_and_come_back() {
    let model = model_with_template("hermes");
    let server = Server::start(model.path(), &["--context", "1024"]);
    let schema = json!({"type": "object", "properties": {"room": {"enum": ["hall", "attic"]}}, "required": ["room"],
        "additionalProperties": false});
    let is_room = |arguments: &Value| arguments["room"] == "hall" || arguments["room"] == "attic";

    let tool = json!({"name": "enter", "input_schema": schema});
    let choice = json!({"type": "tool", "name": "enter", "disable_parallel_tool_use": true});
    let body =
        json!({"messages": user("Go."), "max_tokens": 300, "temperature": 0, "tools": [tool], "tool_choice": choice});
    let answer = server.post("/v1/messages", body.clone()).json();
    let call = answer["content"].as_array().unwrap().iter().find(|block| block["type"] == "tool_use");
    let call = call.unwrap_or_else(|| panic!("{answer}"));
    assert!(call["name"] == "enter" && is_room(&call["input"]) && answer["stop_reason"] == "tool_use", "{answer}");
    let events = events(&server.post("/v1/messages", with(body, json!({"stream": true}))));
    let input: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), call["input"]);
    let result = json!([{"type": "tool_result", "tool_use_id": call["id"], "content": "It is dark."}]);
    let turns = [
        user("Go.")[0].clone(),
        json!({"role": "assistant", "content": answer["content"]}),
        json!({"role": "user", "content": result}),
    ];
    let counted = server.post("/v1/messages/count_tokens", json!({"messages": turns, "tools": [tool]})).json();
    assert!(counted["input_tokens"].as_u64().unwrap() > 20, "{counted}");

    let tool = json!({"type": "function", "name": "enter", "parameters": schema});
    let body = json!({"input": "Go.", "max_output_tokens": 300, "temperature": 0, "tools": [tool],
        "tool_choice": "required", "parallel_tool_calls": false});
    let answer = server.post("/v1/responses", body).json();
    let call = answer["output"].as_array().unwrap().iter().find(|item| item["type"] == "function_call");
    let call = call.unwrap_or_else(|| panic!("{answer}"));
    assert!(is_room(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap()), "{answer}");
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "It is dark."});
    let body =
        json!({"input": [user("Go.")[0], call, output], "tools": [tool], "max_output_tokens": 2, "temperature": 0});
    let next = server.post("/v1/responses", body).json();
    assert!(next["usage"]["input_tokens"].as_u64() > answer["usage"]["input_tokens"].as_u64(), "{next}");
}
