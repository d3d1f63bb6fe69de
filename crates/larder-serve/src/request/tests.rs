//! Tests of the request parser.

use std::collections::{BTreeMap, BTreeSet};

use larder_engine::Sampling;
use larder_text::TextFormat;
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn chat(body: Value) -> Result<ChatRequest> {
    ChatRequest::parse(body.to_string().as_bytes())
}

fn with(field: &str, value: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body[field] = value;
    body
}

#[test]
fn all_fields_are_read() {
    let body = json!({
        "model": "m", "max_tokens": 7, "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0, "top_k": 3,
        "min_p": 0.25, "repetition_penalty": 1.5, "frequency_penalty": -2, "presence_penalty": 2, "seed": -1,
        "stop": ["a", "b"], "stream": true, "stream_options": {"include_usage": true}, "return_progress": true, "logprobs": true,
        "top_logprobs": 4, "n": 1, "user": "x", "metadata": {"a": 1}, "store": false, "unheard_of": [1, {}],
        "logit_bias": {}, "response_format": {"type": "text"}, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto",
        "reasoning_effort": "low", "ignore_eos": true,
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    });
    let got = chat(body).unwrap();
    let params = got.params;
    assert_eq!((params.model.as_deref(), params.max_tokens, params.seed), (Some("m"), Some(5), Some(u64::MAX)));
    assert_eq!((params.stop.len(), params.stream, params.include_usage, params.logprobs), (2, true, true, Some(4)));
    assert!(params.ignore_eos && params.return_progress);
    let sampling = params.sampling.or_defaults(Sampling::default());
    let want = Sampling {
        temperature: 0.5,
        top_k: 3,
        top_p: f32::MIN_POSITIVE,
        min_p: 0.25,
        repetition_penalty: 1.5,
        frequency_penalty: -2.0,
        presence_penalty: 2.0,
    };
    assert_eq!(sampling, want);
    assert_eq!(got.messages, [json!({"role": "system", "content": "a\nb"})]);
    assert_eq!((got.tools.map(|tools| tools.list.len()), &got.extra["reasoning_effort"]), (Some(1), &json!("low")));
}

#[test]
fn null_counts_as_absent() {
    let mut body = json!({"messages": [{"role": "user", "content": "hi", "name": null}]});
    for field in ["model", "temperature", "stop", "seed", "n", "tools", "stream_options", "logit_bias", "tool_choice"] {
        body[field] = Value::Null;
    }
    assert_eq!(chat(body).unwrap(), chat(json!({"messages": [{"role": "user", "content": "hi"}]})).unwrap());
}

#[test]
fn errors_name_the_field_and_the_fault() {
    for (field, value, param, part) in [
        ("temperature", json!("hot"), "temperature", "expected a number, but got a string"),
        ("temperature", json!(3), "temperature", "expected 0 to 2, but got 3"),
        ("max_tokens", json!(1.5), "max_tokens", "expected an integer, but got a decimal number"),
        ("max_tokens", json!(0), "max_tokens", "0 is only allowed with 'echo'"),
        ("max_tokens", json!(-2), "max_tokens", "but got -2 instead"),
        ("n", json!(0), "n", "but got 0 instead"),
        ("n", json!(65), "n", "expected 1 to 64"),
        ("stop", json!(["a", 1]), "stop", "array of strings"),
        ("stop", json!(vec!["a"; 65]), "stop", "at most 64 strings"),
        ("stop", json!(""), "stop", "must not be empty"),
        ("stream", json!(1), "stream", "expected a boolean, but got an integer"),
        ("stream_options", json!(1), "stream_options", "expected an object"),
        ("top_logprobs", json!(2), "top_logprobs", "only allowed when 'logprobs'"),
        ("logit_bias", json!({"x": 2}), "logit_bias", "an object of token ids"),
        ("logit_bias", json!({"1": 200}), "logit_bias", "from -100 to 100"),
        ("logit_bias", json!([1]), "logit_bias", "expected an object"),
        ("response_format", json!({"type": "xml"}), "response_format.type", "'xml' is not one of"),
        ("response_format", json!({"type": "json_schema"}), "response_format.json_schema", "Missing"),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {}}),
            "response_format.json_schema.schema",
            "Missing",
        ),
        ("grammar", json!(1), "grammar", "expected a string"),
        ("regex", json!(["a"]), "regex", "expected a string"),
        ("tool_choice", json!("required"), "tool_choice", "there are no tools"),
        ("tool_choice", json!(7), "tool_choice", "a string or an object"),
        ("tools", json!([1]), "tools[0]", "expected an object"),
        ("reasoning_format", json!("raw"), "reasoning_format", "'raw' is not one of"),
        ("messages", json!([]), "messages", "at least one"),
        ("messages", json!("hi"), "messages", "expected an array of objects"),
        ("messages", json!([1]), "messages[0]", "expected an object"),
        ("messages", json!([{"content": "x"}]), "messages[0].role", "Missing"),
        ("messages", json!([{"role": "king", "content": "x"}]), "messages[0].role", "'king' is not one of"),
        ("messages", json!([{"role": "user"}]), "messages[0].content", "Missing"),
        ("messages", json!([{"role": "user", "content": 5}]), "messages[0].content", "array of objects"),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "audio_url"}]}]),
            "messages[0].content[0]",
            "this model reads text",
        ),
    ] {
        let error = chat(with(field, value)).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{error}");
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn formats_of_answers_are_read_from_several_fields() {
    let format =
        |field: &str, value: Value| chat(with(field, value)).unwrap().params.format.map(|f| (f.field, f.format));
    let schema = json!({"type": "integer"});
    let of = |field, format| Some((field, format));
    assert_eq!(format("response_format", json!({"type": "text"})), None);
    assert_eq!(
        format("response_format", json!({"type": "json_object"})),
        of("response_format", TextFormat::JsonObject)
    );
    let openai = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
    let llama = json!({"type": "json_object", "schema": schema});
    for value in [openai, llama] {
        assert_eq!(format("response_format", value), of("response_format", TextFormat::JsonSchema(schema.clone())));
    }
    assert_eq!(format("json_schema", schema.clone()), of("json_schema", TextFormat::JsonSchema(schema.clone())));
    assert_eq!(format("grammar", json!("start: \"a\"")), of("grammar", TextFormat::Lark("start: \"a\"".into())));
    assert_eq!(format("grammar", json!("root ::= \"a\"")), of("grammar", TextFormat::Gbnf("root ::= \"a\"".into())));
    assert_eq!(format("grammar", json!("")), None);
    assert_eq!(format("regex", json!("a+")), of("regex", TextFormat::Regex("a+".into())));
    let both = json!({"messages": [{"role": "user", "content": "x"}], "regex": "a", "grammar": "start: \"a\""});
    assert!(chat(both).unwrap_err().message.contains("either 'grammar' or 'regex'"));
    let endless = json!({"messages": [{"role": "user", "content": "x"}], "regex": "a", "ignore_eos": true});
    assert_eq!(chat(endless).unwrap_err().param.as_deref(), Some("ignore_eos"));
}

#[test]
fn biases_and_limits_of_tokens() {
    let params = |field: &str, value: Value| chat(with(field, value)).unwrap().params;
    assert_eq!(params("logit_bias", json!({"7": -100, "9": 2.5})).logit_bias, [(7, -100.0), (9, 2.5)]);
    assert_eq!(params("max_tokens", json!(-1)).max_tokens, Some(usize::MAX));
    let tokens = TokenizeRequest::parse(br#"{"content": "a", "add_special": true}"#).unwrap();
    assert_eq!(tokens, TokenizeRequest { content: "a".into(), add_special: true, with_pieces: false });
    for (body, param) in [(&b"{}"[..], "content"), (br#"{"content": 1}"#, "content")] {
        assert_eq!(TokenizeRequest::parse(body).unwrap_err().param.as_deref(), Some(param));
    }
    assert_eq!(DetokenizeRequest::parse(br#"{"tokens": [1, 2]}"#).unwrap().tokens, [1, 2]);
    assert!(DetokenizeRequest::parse(br#"{"tokens": [-1]}"#).unwrap_err().message.contains("array of token ids"));
}

#[test]
fn malformed_bodies_are_refused_in_one_sentence() {
    for (body, part) in [
        (&b""[..], "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, but it is an array"),
        (b"{\"a\": \"\xff\"}", "not UTF-8, from byte 7"),
        (b"{\"temperature\": 1e999}", "not valid JSON"),
        (b"{}", "'messages'"),
    ] {
        let error = ChatRequest::parse(body).unwrap_err();
        assert!(error.message.contains(part), "{error}");
    }
    let deep = "[".repeat(100_000);
    assert!(ChatRequest::parse(deep.as_bytes()).is_err());
}

#[test]
fn prompts_come_in_four_forms_and_several_at_once() {
    let read = |prompt: Value| {
        CompletionRequest::parse(json!({"prompt": prompt, "logprobs": 2}).to_string().as_bytes()).map(|r| r.prompts)
    };
    let (a, tokens) = (vec![Prompt::Text("a".into())], vec![Prompt::Tokens(vec![1, 2])]);
    assert_eq!([read(json!("a")).unwrap(), read(json!(["a"])).unwrap()], [a.clone(), a.clone()]);
    assert_eq!([read(json!([1, 2])).unwrap(), read(json!([[1, 2]])).unwrap()], [tokens.clone(), tokens.clone()]);
    assert_eq!(read(json!(["a", [1, 2], "a"])).unwrap(), [a.clone(), tokens, a].concat());
    assert!(read(json!(vec!["a"; 65])).unwrap_err().message.contains("at most 64 answers per request, not 65"));
    let answers = json!({"prompt": ["a", "b"], "n": 33, "best_of": 33}).to_string();
    assert!(CompletionRequest::parse(answers.as_bytes()).unwrap_err().message.contains("not 66"));
    let best = json!({"prompt": "a", "n": 2, "best_of": 4}).to_string();
    assert_eq!(CompletionRequest::parse(best.as_bytes()).unwrap_err().param.as_deref(), Some("best_of"));
    assert!(read(json!([-1])).is_err() && read(json!(7)).is_err() && read(json!([1, "a"])).is_err());
    let echo = json!({"prompt": "a", "echo": true, "max_tokens": 0}).to_string();
    assert!(CompletionRequest::parse(echo.as_bytes()).unwrap().params.echo);
}

#[test]
fn tool_call_arguments_become_objects() {
    let calls = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]);
    let got = chat(json!({"messages": [{"role": "assistant", "content": null, "tool_calls": calls}]})).unwrap();
    assert_eq!(got.messages[0]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
    assert_eq!(got.messages[0]["content"], "");
}

#[test]
fn older_and_looser_forms_are_read() {
    let body = json!({
        "max_tokens": 16.0, "top_k": -1.0, "seed": 3.0, "stop": vec!["x"; 64],
        "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": ""}},
            {"role": "function", "name": "f", "content": "42"},
        ],
    });
    let ChatRequest { params, messages, tools, .. } = chat(body).unwrap();
    assert_eq!((params.max_tokens, params.seed, params.stop.len()), (Some(16), Some(3), 64));
    assert_eq!(params.sampling.or_defaults(Sampling { top_k: 9, ..Sampling::default() }).top_k, 0);
    let call = json!({"type": "function", "function": {"name": "f", "arguments": {}}});
    assert_eq!(messages[0], json!({"role": "assistant", "content": "", "tool_calls": [call]}));
    assert_eq!(messages[1], json!({"role": "tool", "content": "42", "name": "f"}));
    assert_eq!((tools.unwrap().list.len(), params.notes.len()), (1, 1));
}

#[test]
fn messages_repeat_little_of_what_a_client_sent() {
    let long = "x".repeat(5_000);
    for (field, value) in [
        ("messages", json!([{"role": long, "content": "x"}])),
        ("messages", json!([{"role": "user", "content": [{"type": long}]}])),
        ("tool_choice", json!(long)),
        ("reasoning_format", json!(long)),
        ("response_format", json!({"type": long})),
    ] {
        let message = chat(with(field, value)).unwrap_err().message;
        assert!(message.len() < 400 && message.contains('…'), "{message}");
    }
}

#[test]
fn an_answer_continues_an_assistants_message_only() {
    let body = |role: &str| json!({"messages": [{"role": role, "content": "x"}], "continue_final_message": true});
    assert!(chat(body("assistant")).unwrap().continues);
    assert_eq!(chat(body("user")).unwrap_err().param.as_deref(), Some("continue_final_message"));
}

#[test]
fn routing_is_given_by_lambda_or_by_spec() {
    assert_eq!(parse_routing(b"{\"lambda\": 0.5}").unwrap(), RoutingChange::Lambda(0.5));
    let spec = RoutingChange::Spec("prune:h=2".into());
    assert_eq!(parse_routing(b"{\"routing\": \"prune:h=2\"}").unwrap(), spec);
    assert!(parse_routing(b"{}").is_err() && parse_routing(b"{\"lambda\": -1}").is_err());
    assert!(parse_routing(b"{\"lambda\": 1, \"routing\": \"original\"}").is_err());
}

#[test]
fn beginnings_that_shifts_keep_are_read() {
    let keep = |value: Value| chat(with("n_keep", value)).map(|chat| chat.params.keep).map_err(|error| error.param);
    assert_eq!((keep(json!(-1)), keep(json!(7)), keep(Value::Null)), (Ok(Some(usize::MAX)), Ok(Some(7)), Ok(None)));
    assert_eq!(keep(json!(-2)), Err(Some("n_keep".into())));
}

/// All objects in the bodies of routes, of each name once.
fn objects() -> BTreeMap<&'static str, &'static Object> {
    fn add(table: &'static Object, all: &mut BTreeMap<&'static str, &'static Object>) {
        match all.insert(table.name, table) {
            Some(other) => assert!(std::ptr::eq(other, table), "two objects have the name {}", table.name),
            None => table.fields().filter_map(|field| field.kind.object()).for_each(|table| add(table, all)),
        }
    }
    let mut all = BTreeMap::new();
    crate::http::ROUTES.iter().filter_map(|route| route.body).for_each(|table| add(table, &mut all));
    all
}

#[test]
fn no_table_has_a_field_twice() {
    for table in objects().values() {
        let names: Vec<&str> = table.fields().map(|field| field.name).collect();
        let distinct: BTreeSet<&str> = names.iter().copied().collect();
        assert_eq!(names.len(), distinct.len(), "{}", table.name);
    }
}

/// Bodies in which parsers come to every field that they know.
fn parse_all() {
    let parts = json!([
        {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "a"}, {"type": "tool_reference", "tool_name": "a"},
        {"type": "document", "source": {"type": "text", "data": "a"}}, {"type": "search_result", "content": "a"},
        {"type": "document", "source": {"type": "content", "content": "a"}},
    ]);
    let images = json!([
        {"type": "image_url", "image_url": {"url": "aGk="}}, {"type": "image", "source": {"type": "base64", "data": "aGk="}},
        {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}},
    ]);
    let call = json!({"function": {"name": "f", "arguments": {}}});
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let schema = json!({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}});
    let chat_body = json!({
        "messages": [
            {"role": "user", "content": images},
            {"role": "assistant", "content": parts, "function_call": {"name": "f"}, "tool_calls": [call]},
        ],
        "continue_final_message": true, "tools": [tool, {"type": "web_search"}], "stream_options": {},
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "response_format": schema,
    });
    let text = |body: &Value| body.to_string().into_bytes();
    ChatRequest::parse(&text(&chat_body)).unwrap();
    chat(with("response_format", json!({"type": "json_object"}))).unwrap();
    CompletionRequest::parse(br#"{"prompt": "a", "suffix": "b"}"#).unwrap();
    let infill = br#"{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]}"#;
    CompletionRequest::parse_infill(infill).unwrap();
    let responses = json!({
        "input": [
            {"role": "user", "content": "a"}, {"type": "reasoning", "summary": [{"text": "a"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "custom_tool_call", "call_id": "2", "name": "f", "input": "a"},
        ],
        "tools": [{"type": "function", "name": "f"}, {"type": "namespace", "name": "n", "tools": []}],
        "tool_choice": {"type": "function", "name": "f"}, "text": {"format": schema}, "reasoning": {},
    });
    ResponsesRequest::parse(&text(&responses)).unwrap();
    let tool_use = json!({"type": "tool_use", "id": "1", "name": "f", "input": {}});
    let anthropic = json!({
        "max_tokens": 1, "system": "a", "tools": [{"name": "f", "input_schema": {}}], "thinking": {"type": "enabled"},
        "messages": [
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, tool_use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}, {"role": "user", "content": parts},
            {"role": "user", "content": images},
        ],
        "tool_choice": {"type": "tool", "name": "f"}, "output_config": {"format": schema},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    });
    ChatRequest::parse_anthropic(&text(&anthropic)).unwrap();
    ChatRequest::parse_anthropic_count(&text(&anthropic)).unwrap();
    let ollama = json!({
        "options": {}, "tools": [tool],
        "messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "a"}],
    });
    ChatRequest::parse_ollama(&text(&ollama)).unwrap();
    OllamaGenerateRequest::parse(br#"{"prompt": "a"}"#).unwrap();
    for table in [&OLLAMA_CHAT, &OLLAMA_GENERATE] {
        OllamaLoadRequest::parse(b"{}", table).unwrap();
    }
    shown_model(b"{}").unwrap();
    for (body, style) in [
        (r#"{"input": "a"}"#, EmbeddingStyle::OpenAi),
        (r#"{"input": "a"}"#, EmbeddingStyle::Ollama),
        (r#"{"prompt": "a"}"#, EmbeddingStyle::OllamaOne),
    ] {
        EmbeddingRequest::parse(body.as_bytes(), style).unwrap();
    }
    TokenizeRequest::parse(br#"{"content": "a"}"#).unwrap();
    DetokenizeRequest::parse(br#"{"tokens": [1]}"#).unwrap();
    MathmlRequest::parse(br#"{"formulas": [{"latex": "x"}]}"#).unwrap();
    parse_routing(br#"{"lambda": 1}"#).unwrap();
    slot_file(br#"{"filename": "a"}"#).unwrap();
}

#[test]
fn every_field_of_the_tables_is_read_and_no_other() {
    fields::reads::all();
    parse_all();
    let read = fields::reads::all();
    let is_checked_only = |kind| matches!(kind, Kind::Unread | Kind::Refused(_) | Kind::Choice(&[_]));
    // The model is chosen before a body is parsed.
    let listed = objects().into_iter().flat_map(|(name, table)| table.fields().map(move |field| (name, field)));
    let listed: BTreeMap<_, _> = listed.map(|(name, field)| ((name, field.name.to_owned()), field.kind)).collect();
    let unread: Vec<_> = listed
        .iter()
        .filter(|(field, kind)| !is_checked_only(**kind) && field.1 != "model" && !read.contains(*field))
        .collect();
    assert!(unread.is_empty(), "{:?}", unread.iter().map(|(field, _)| field).collect::<Vec<_>>());
    let unlisted: Vec<_> = read.iter().filter(|field| !listed.contains_key(*field)).collect();
    assert!(unlisted.is_empty() && read.len() > 150, "{unlisted:?} of {}", read.len());
}

#[test]
fn what_a_table_does_not_have_is_not_there() {
    static TABLE: Object = Object { name: "Table", groups: &[&[field("known", Kind::Text, "")]] };
    let body = json!({"known": "a", "other": "b"});
    let fields = Fields::of(&body, "", &TABLE).unwrap();
    assert_eq!((fields.string("known"), fields.unknown().count()), (Some("a"), 1));
    let read = std::panic::catch_unwind(|| Fields::of(&body, "", &TABLE).unwrap().string("other").is_none());
    assert!(read.is_err() || read.is_ok_and(|missing| missing));
}

#[test]
fn refused_fields_pass_with_the_values_that_change_nothing() {
    for field in CHAT.fields() {
        let Kind::Refused(neutral) = field.kind else { continue };
        for value in neutral.values() {
            assert!(chat(with(field.name, value.clone())).is_ok(), "{} = {value}", field.name);
        }
        let refused = chat(with(field.name, json!({"strange": 1}))).unwrap_err();
        assert_eq!(refused.param.as_deref(), Some(field.name));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = (ChatRequest::parse(&bytes), CompletionRequest::parse(&bytes), parse_routing(&bytes));
    }
}
