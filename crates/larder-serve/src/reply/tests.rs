//! Tests of the formats on an answer that has every kind of part.

use std::time::Duration;

use larder_engine::FinishReason;
use serde_json::json;

use super::*;
use crate::request::Namespaces;

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: format!("id_{name}"), name: name.into(), arguments: arguments.into() }
}

fn answer() -> Answer {
    let summary = GenerationSummary {
        finish: FinishReason::EndOfText,
        stop_string: None,
        prompt_tokens: 10,
        cached_tokens: 4,
        miss: None,
        generated_tokens: 6,
        context: Default::default(),
        queued: Duration::from_nanos(1),
        prefill: Duration::from_nanos(20),
        decode: Duration::from_nanos(300),
    };
    let calls = vec![call("f", "{\"a\": 1}"), call("g", "{}")];
    let message = AnswerMessage { reasoning: "hm".into(), content: "I look.".into(), calls };
    Answer { message, tokens: vec![], summary }
}

/// The events of a stream of the answer, in two deltas.
fn streamed(format: &mut dyn ResponseFormat) -> Vec<ResponseEvent> {
    let answer = answer();
    let first = [
        MessagePart::Reasoning("hm".into()),
        MessagePart::Content("I ".into()),
        MessagePart::Content("look.".into()),
        MessagePart::Call(0),
        MessagePart::Arguments(0, "{\"a\":".into()),
    ];
    let second =
        [MessagePart::Arguments(0, " 1}".into()), MessagePart::Call(1), MessagePart::Arguments(1, "{}".into())];
    let mut events = format.begin(0);
    events.extend(format.parts(0, &first, &answer.message, &[]));
    events.extend(format.parts(0, &second, &answer.message, &[]));
    events.extend(format.end(0, &answer));
    events.extend(format.end_all(&[answer.summary]));
    events
}

#[test]
fn anthropics_blocks_are_those_of_the_whole_message() {
    let format = || AnthropicFormat::new(1, "m", 10, vec![]);
    let whole = format().complete(&[answer()]);
    let want = json!([
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "id_f", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "id_g", "name": "g", "input": {}},
    ]);
    assert_eq!((&whole["content"], &whole["stop_reason"]), (&want, &json!("tool_use")));
    assert_eq!((&whole["usage"]["input_tokens"], &whole["usage"]["cache_read_input_tokens"]), (&json!(6), &json!(4)));

    let events = streamed(&mut format());
    let of = |index: usize| events.iter().filter(move |event| event.data["index"] == index);
    for index in 0..4 {
        let names: Vec<&str> = of(index).filter_map(|event| event.name).collect();
        assert_eq!((names[0], names[names.len() - 1]), ("content_block_start", "content_block_stop"), "{index}");
    }
    let input: String = of(2).filter_map(|event| event.data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(input, "{\"a\": 1}");
    assert_eq!(events[events.len() - 2].data["usage"], whole["usage"]);
}

#[test]
fn the_items_of_responses_are_those_of_the_whole_response() {
    let format = || ResponsesFormat::new(1, "m", Map::new(), Namespaces::default());
    let whole = format().complete(&[answer()]);
    let kinds: Vec<&str> =
        whole["output"].as_array().unwrap().iter().filter_map(|item| item["type"].as_str()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(whole["output"][2]["arguments"], "{\"a\": 1}");

    let events = streamed(&mut format());
    let done: Vec<&Value> =
        events.iter().filter(|e| e.name == Some("response.output_item.done")).map(|e| &e.data["item"]).collect();
    let last = &events.last().unwrap().data["response"];
    assert_eq!(last["output"], json!(done));
    let without_id = |output: &Value| {
        let mut items = output.as_array().unwrap().clone();
        items.iter_mut().for_each(|item| item["id"] = Value::Null);
        items
    };
    assert_eq!(without_id(&last["output"]), without_id(&whole["output"]));
    assert!(events.iter().enumerate().all(|(i, event)| event.data["sequence_number"] == i));
}

#[test]
fn responses_fail_by_an_error_or_as_a_response() {
    let mut format = ResponsesFormat::new(1, "m", Map::new(), Namespaces::default());
    let error = ApiError::timed_out(5);
    let before = format.failed(&error);
    assert_eq!((before.name, &before.data["code"]), (Some("error"), &json!("timeout")));
    format.begin(0);
    let after = format.failed(&error);
    assert_eq!((after.name, &after.data["response"]["status"]), (Some("response.failed"), &json!("failed")));
    assert_eq!(after.data["sequence_number"], 2);
}

#[test]
fn ollamas_calls_are_whole() {
    let events = streamed(&mut OllamaFormat::new(OllamaEndpoint::Chat, "m"));
    let calls: Vec<&Value> = events.iter().filter_map(|e| e.data["message"].get("tool_calls")).collect();
    let of = |name: &str, arguments: Value| {
        let function = json!({"name": name, "arguments": arguments});
        json!([{"id": format!("id_{name}"), "function": function}])
    };
    assert_eq!(calls, [&of("f", json!({"a": 1})), &of("g", json!({}))]);
    let text: String = events.iter().filter_map(|e| e.data["message"]["content"].as_str()).collect();
    assert_eq!((text.as_str(), &events[0].data["message"]["thinking"]), ("I look.", &json!("hm")));
    let last = &events.last().unwrap().data;
    assert_eq!((&last["total_duration"], &last["eval_duration"]), (&json!(321), &json!(300)));
    let whole = OllamaFormat::new(OllamaEndpoint::Generate, "m").complete(&[answer()]);
    assert_eq!((&whole["response"], &whole["thinking"]), (&json!("I look."), &json!("hm")));
    assert_eq!(whole["done_reason"], "stop");
}
