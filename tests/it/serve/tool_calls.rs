//! Tool calls and reasoning: forced by grammar on a tiny model with a tool template, separated, and streamed.

use serde_json::{Value, json};

use super::api::Server;
use super::model_with_template;

/// Tools in the system message, calls as JSON between marks, reasoning.
const HERMES: &str = "hermes";
/// Each argument of a call between marks of its own.
const GLM: &str = "glm";

fn tools() -> Value {
    let weather = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([tool("weather", weather), tool("now", none)])
}

fn asked(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "How warm is it?"}], "tools": tools(), "max_tokens": 1500, "temperature": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(server: &Server, more: Value) -> Value {
    let answer = server.post("/v1/chat/completions", asked(more)).json();
    assert!(answer["choices"].is_array(), "{answer}");
    answer["choices"][0].clone()
}

/// Checks the calls of a message, and returns their names.
fn names_of(message: &Value) -> Vec<String> {
    let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{message}"));
    let name = |call: &Value| {
        assert_eq!((&call["type"], call["id"].as_str().map(str::len)), (&json!("function"), Some(9)), "{call}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        match call["function"]["name"].as_str().unwrap() {
            "weather" => {
                assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{call}");
                assert!((1..=9).contains(&arguments["days"].as_u64().unwrap()), "{call}");
            }
            name => assert_eq!((name, &arguments), ("now", &json!({}))),
        }
        call["function"]["name"].as_str().unwrap().to_owned()
    };
    calls.iter().map(name).collect()
}

/// The message that the deltas of a stream add up to, and the finish reason.
fn joined(chunks: &[Value]) -> (Value, Value) {
    let (mut content, mut reasoning, mut calls, mut finish) =
        (String::new(), String::new(), Vec::<Value>::new(), Value::Null);
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                calls.push(call.clone());
                continue;
            }
            let mut arguments = calls[index]["function"]["arguments"].as_str().unwrap().to_owned();
            arguments += call["function"]["arguments"].as_str().unwrap();
            calls[index]["function"]["arguments"] = arguments.into();
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (json!({"content": content, "reasoning_content": reasoning, "tool_calls": calls}), finish)
}

#[test]
fn required_and_named_tools_are_called_with_valid_arguments() {
    for template in [HERMES, GLM] {
        let model = model_with_template(template);
        let server = Server::start(model.path(), &["--context", "2048"]);
        for seed in 0..6 {
            let sampled = json!({"tool_choice": "required", "temperature": 1.0, "seed": seed});
            let choice = chat(&server, sampled);
            assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
            assert!(!names_of(&choice["message"]).is_empty());
            let one =
                json!({"tool_choice": "required", "parallel_tool_calls": false, "temperature": 1.0, "seed": seed});
            assert_eq!(names_of(&chat(&server, one)["message"]).len(), 1);
        }
        for name in ["weather", "now"] {
            let choice = json!({"type": "function", "function": {"name": name}});
            let one = json!({"tool_choice": choice, "parallel_tool_calls": false});
            assert_eq!(names_of(&chat(&server, one)["message"]), [name]);
        }
    }
}

#[test]
fn streamed_calls_add_up_to_those_of_the_whole_response() {
    for template in [HERMES, GLM] {
        let model = model_with_template(template);
        let server = Server::start(model.path(), &["--context", "2048"]);
        let more = json!({"tool_choice": "required", "temperature": 1.0, "seed": 5});
        let whole = chat(&server, more.clone());
        let mut streamed = more;
        streamed["stream"] = json!(true);
        let chunks = server.post("/v1/chat/completions", asked(streamed)).chunks();
        let (message, finish) = joined(&chunks);
        assert_eq!((names_of(&message), &finish), (names_of(&whole["message"]), &json!("tool_calls")));
        let arguments = |message: &Value| -> Vec<Value> {
            message["tool_calls"].as_array().unwrap().iter().map(|call| call["function"]["arguments"].clone()).collect()
        };
        assert_eq!((arguments(&message), &message["content"]), (arguments(&whole["message"]), &json!("")));
        let pieces = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["tool_calls"].is_array()).count();
        assert!(pieces > 3, "{pieces} deltas of calls");
    }
}

/// A grammar of exactly one text.
fn only(text: &str) -> String {
    format!("start: {}", Value::from(text))
}

#[test]
fn calls_that_the_model_writes_by_itself_are_separated() {
    let model = model_with_template(GLM);
    let server = Server::start(model.path(), &["--context", "2048"]);
    let text = "I look.\n<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>\
                <arg_value>2</arg_value></tool_call>";
    // Beside a grammar a call may come too; without "<" at the beginning it does not.
    let body = json!({"grammar": only(text), "logit_bias": {"27": -100}});
    let choice = chat(&server, body.clone());
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("I look."), &json!("tool_calls")));
    assert_eq!(names_of(&choice["message"]), ["weather"]);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let (joined, _) = joined(&server.post("/v1/chat/completions", asked(streamed)).chunks());
    assert_eq!((&joined["content"], names_of(&joined)), (&json!("I look."), vec!["weather".to_owned()]));
    // Without tools a call is text.
    let plain = chat(&server, json!({"grammar": only(text), "tool_choice": "none"}));
    assert_eq!((&plain["message"]["content"], &plain["finish_reason"]), (&json!(text), &json!("stop")));
}

#[test]
fn reasoning_has_a_field_of_its_own_unless_it_is_to_stay_in_the_text() {
    let model = model_with_template(HERMES);
    let server = Server::start(model.path(), &["--context", "512"]);
    let thinking = json!({"enable_thinking": true});
    let body = json!({
        "max_tokens": 20, "chat_template_kwargs": thinking, "ignore_eos": true, "temperature": 1.0, "seed": 1,
    });
    let message = chat(&server, body.clone())["message"].clone();
    assert_eq!(message["content"], "");
    let reasoning = message["reasoning_content"].as_str().unwrap().to_owned();
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let (joined, _) = joined(&server.post("/v1/chat/completions", asked(streamed)).chunks());
    assert_eq!((joined["reasoning_content"].as_str().unwrap(), &joined["content"]), (reasoning.as_str(), &json!("")));
    let mut together = body;
    (together["reasoning_format"], together["tool_choice"]) = (json!("none"), json!("none"));
    let message = chat(&server, together)["message"].clone();
    assert!(message["reasoning_content"].is_null() && !message["content"].as_str().unwrap().is_empty(), "{message}");
    // The marks are in the text then.
    let more =
        json!({"grammar": only("<think>hm</think>So be it."), "reasoning_format": "none", "tool_choice": "none"});
    let message = chat(&server, more)["message"].clone();
    assert!(message["content"].as_str().unwrap().starts_with("<think>"), "{message}");
    assert!(message["reasoning_content"].is_null(), "{message}");
}

#[test]
fn an_answer_beside_tools_is_a_call_or_of_the_format() {
    let model = model_with_template(HERMES);
    let server = Server::start(model.path(), &["--context", "2048"]);
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let (mut calls, mut answers) = (0, 0);
    for seed in 0..12 {
        let more = json!({"json_schema": schema, "temperature": 2.0, "seed": seed, "parallel_tool_calls": false});
        let message = chat(&server, more)["message"].clone();
        match message["tool_calls"].is_array() {
            true => calls += names_of(&message).len(),
            false => {
                let answer: Value = serde_json::from_str(message["content"].as_str().unwrap()).unwrap();
                assert!(answer["ok"].is_boolean(), "{message}");
                answers += 1;
            }
        }
    }
    assert_eq!(calls + answers, 12);
}

#[test]
fn reasoning_that_the_prompt_opens_ends_before_the_format() {
    let model = model_with_template(HERMES);
    let server = Server::start(model.path(), &["--context", "512"]);
    let body = json!({
        "regex": "yes|no", "max_tokens": 20, "chat_template_kwargs": {"enable_thinking": true}, "tool_choice": "none",
    });
    // The tiny model does not end its reasoning, so the format is not reached; it must not begin within the reasoning.
    let choice = chat(&server, body.clone());
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
    assert!(choice["message"]["reasoning_content"].as_str().is_some_and(|text| text.len() > 5), "{choice}");
    let mut short = body;
    short["chat_template_kwargs"] = json!({"enable_thinking": false});
    short["logit_bias"] = json!({"27": -100}); // "<", which begins reasoning
    let choice = chat(&server, short);
    assert!(["yes", "no"].contains(&choice["message"]["content"].as_str().unwrap()), "{choice}");
}

#[test]
fn calls_and_their_results_go_back_into_the_prompt() {
    let model = model_with_template(HERMES);
    let server = Server::start(model.path(), &["--context", "2048"]);
    let call = json!({"id": "abc", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\", \"days\": 2}"}});
    let messages = json!([
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": null, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "abc", "content": "21 degrees"},
    ]);
    let prompt = server.post("/apply-template", json!({"messages": messages, "tools": tools()})).json();
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.contains(
        "<think>hm</think><tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 2}}"
    ));
    assert!(prompt.contains("<|im_start|>tool\n21 degrees<|im_end|>") && prompt.contains("Tools: [{"), "{prompt}");
}

#[test]
fn requests_for_tools_that_cannot_be_called_are_refused_by_name() {
    let model = model_with_template(HERMES);
    let server = Server::start(model.path(), &["--context", "512"]);
    let refused = |more: Value, expected: (&str, &str)| {
        let answer = server.post("/v1/chat/completions", asked(more));
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(expected.0)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(expected.1), "{error}");
    };
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    refused(json!({"tool_choice": function("other")}), ("tool_choice", "no tool has the name 'other'"));
    refused(json!({"tool_choice": "always"}), ("tool_choice", "'always' is not one of auto, none, required, any"));
    refused(json!({"tool_choice": "required", "tools": []}), ("tool_choice", "there are no tools"));
    refused(json!({"tools": [{"type": "function"}]}), ("tools[0].function", "Missing"));
    refused(json!({"tools": [function("a b")]}), ("tools[0].function.name", "1 to 128 bytes"));
    let recursive = json!({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]});
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters": recursive}}]);
    refused(json!({"tools": tool, "tool_choice": "required"}), ("tools", "not"));
}
