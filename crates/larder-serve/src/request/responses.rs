//! The body of OpenAI's `/v1/responses`, as a chat.

use std::sync::Arc;

use larder_text::TextFormat;
use serde_json::{Map, Value, json};

use super::author::Author;
use super::context::{CONTEXT_FULL, TRUNCATION};
use super::dialogue::Dialogue;
use super::fields::Fields;
use super::format::{FORMAT_TYPES, SCHEMA};
use super::image::RequestImage;
use super::neutral::Neutral;
use super::parts::{self, CONTENT};
use super::settings::{self, EFFORT, MODEL, REPETITION_PENALTY, RETURN_PROGRESS, SAMPLING, STREAM, TEMPLATE_KWARGS};
use super::table::{Kind, Object, field};
use super::tools::{CHOICES, Namespaces, OfferedTools, PARALLEL, flat_name};
use super::unsupported::{IGNORED, UNSUPPORTED, refused, unread};
use super::{ChatRequest, GenerationParams, RequestedFormat};
use crate::error::{ApiError, Result, excerpt};

const NO_RESPONSES: &str = "this server keeps no responses; give the whole conversation as 'input'";

/// The fields of `/v1/responses`.
pub static RESPONSES: Object = Object {
    name: "ResponsesRequest",
    groups: &[
        &[
            MODEL,
            field("input", Kind::Either(&[Kind::Text, Kind::Objects(&ITEM)]), "a text, or items").required(),
            field("instructions", Kind::Text, "a system message before the input"),
            field("max_output_tokens", Kind::Integer(1, u32::MAX as i128), "limit of the answer"),
            STREAM,
            RETURN_PROGRESS,
            REPETITION_PENALTY,
            field(
                "tools",
                Kind::Objects(&TOOL),
                "functions, and namespaces of them; others are not offered to the model",
            ),
            field("tool_choice", Kind::Either(&[CHOICES, Kind::Object(&TOOL_CHOICE)]), "whether tools are called"),
            PARALLEL,
            field("text", Kind::Object(&TEXT), "the format of the answer"),
            field("reasoning", Kind::Object(&REASONING), "how much to reason"),
            EFFORT,
            TEMPLATE_KWARGS,
            TRUNCATION,
            CONTEXT_FULL,
            field("metadata", Kind::Any, "repeated in the response"),
            field("user", Kind::Any, "repeated in the response"),
            field("max_tool_calls", Kind::Any, "repeated in the response"),
            refused("previous_response_id", Neutral::Empty, NO_RESPONSES),
            refused("conversation", Neutral::Empty, NO_RESPONSES),
            refused("prompt", Neutral::Empty, "this server keeps no prompts; give 'instructions' and 'input'"),
            refused(
                "background",
                Neutral::Numbers(&[0.0]),
                "this server keeps no responses; use 'stream' for long answers",
            ),
            refused("top_logprobs", Neutral::Numbers(&[0.0]), "use it with /v1/chat/completions"),
        ],
        SAMPLING,
        UNSUPPORTED,
        IGNORED,
    ],
};

/// Items of all types; those of tools of OpenAI's own servers are left out.
static ITEM: Object = Object {
    name: "ResponsesItem",
    groups: &[&[
        field("type", Kind::Text, "`message`, `reasoning`, a call or its output; items of built-in tools are left out"),
        field("role", Kind::Choice(&["user", "assistant", "system", "developer"]), "the author of `message`"),
        field("content", CONTENT, "the text of `message` or `reasoning`"),
        field("summary", CONTENT, "the text of `reasoning` without content"),
        field("call_id", Kind::Text, "the id of a call, or of the one whose output this is"),
        field("name", Kind::Text, "the tool of a call"),
        field("namespace", Kind::Text, "the namespace of the tool"),
        field("arguments", Kind::Either(&[Kind::Text, Kind::Map]), "the arguments of `function_call`, as JSON"),
        field("input", Kind::Text, "the text of `custom_tool_call`"),
        field("output", Kind::Either(&[CONTENT, Kind::Map]), "the output of a call: a text, or parts"),
    ]],
};

static TOOL: Object = Object {
    name: "ResponsesTool",
    groups: &[&[
        field("type", Kind::Text, "`function` or `namespace`; others are not offered to the model").required(),
        field("name", Kind::Text, "its name"),
        field("description", Kind::Text, "passed to the chat template"),
        field("parameters", Kind::Map, "a JSON Schema of its arguments"),
        field("strict", Kind::Boolean, "passed to the chat template"),
        field("tools", Kind::Objects(&TOOL), "the functions of `namespace`"),
    ]],
};

static TOOL_CHOICE: Object = Object {
    name: "ResponsesToolChoice",
    groups: &[&[
        field("type", Kind::Text, "`function`").required(),
        field("name", Kind::Text, "its name"),
        field("namespace", Kind::Text, "its namespace"),
    ]],
};

static TEXT: Object = Object {
    name: "ResponsesText",
    groups: &[&[
        field("format", Kind::Object(&TEXT_FORMAT), "what the answer has to match"),
        unread("verbosity", "ignored"),
    ]],
};

static TEXT_FORMAT: Object = Object {
    name: "ResponsesTextFormat",
    groups: &[&[
        field("type", FORMAT_TYPES, "what the answer is"),
        field("schema", SCHEMA, "the schema of `json_schema`"),
        unread("name", "ignored"),
        unread("strict", "ignored: a schema is always enforced"),
    ]],
};

static REASONING: Object = Object {
    name: "ResponsesReasoning",
    groups: &[&[
        field("effort", Kind::Text, "passed to the chat template as `reasoning_effort`"),
        unread("summary", "ignored"),
    ]],
};

/// The body of `/v1/responses`.
#[derive(Clone, PartialEq, Debug)]
pub struct ResponsesRequest {
    /// The chat.
    pub chat: ChatRequest,
    /// Fields that the response repeats.
    pub echo: Map<String, Value>,
    /// Namespaces of tools.
    pub namespaces: Namespaces,
}

/// Items of the input that say what a tool of OpenAI's own servers did.
const SERVER_ITEMS: &[&str] = &[
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
];

impl ResponsesRequest {
    /// Parses and checks a body.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", &RESPONSES)?;
        let (echo, mut notes) = (echo(&fields)?, Vec::new());
        let (messages, images) = messages(&fields, &mut notes)?;
        let offered = tools(&fields)?;
        let mut params = GenerationParams {
            max_tokens: fields.count("max_output_tokens"),
            return_progress: fields.flag("return_progress"),
            context_full: super::context::truncation(&fields),
            format: format(&fields)?,
            ..settings::shared_params(&fields, &fields, &["repetition_penalty"])
        };
        let (tools, extra) = (offered.requested()?, extra(&fields)?);
        params.notes = notes.into_iter().chain(offered.notes).chain(fields.unknown()).collect();
        let chat = ChatRequest { params, messages, images, tools, extra, ..ChatRequest::default() };
        let chat = ChatRequest { separate_reasoning: true, ..chat };
        Ok(ResponsesRequest { chat, echo, namespaces: offered.namespaces })
    }
}

fn extra(fields: &Fields) -> Result<Map<String, Value>> {
    let effort = fields.object("reasoning")?.and_then(|reasoning| reasoning.string("effort"));
    Ok(settings::extra(fields, effort))
}

/// `text.format`, whose schema is not nested as in a chat's `response_format`.
fn format(fields: &Fields) -> Result<Option<RequestedFormat>> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = text.object("format")? else { return Ok(None) };
    let format = match format.string("type") {
        Some("json_object") => TextFormat::JsonObject,
        Some("json_schema") => TextFormat::JsonSchema(format.required("schema")?.clone()),
        _ => return Ok(None),
    };
    Ok(Some(RequestedFormat { field: "text.format", format }))
}

fn messages(fields: &Fields, notes: &mut Vec<String>) -> Result<(Vec<Value>, Vec<Arc<RequestImage>>)> {
    let mut dialogue = Dialogue::default();
    if let Some(instructions) = fields.string("instructions") {
        dialogue.text("system", instructions);
    }
    match fields.required("input")? {
        Value::String(text) => dialogue.text("user", text.as_str()),
        Value::Array(items) if items.is_empty() => return Err(Dialogue::empty("input")),
        _ => fields.objects("input")?.iter().try_for_each(|item| add_item(&mut dialogue, item, notes))?,
    }
    dialogue.finish("input")
}

fn add_item(dialogue: &mut Dialogue, item: &Fields, notes: &mut Vec<String>) -> Result<()> {
    match item.string("type") {
        None | Some("message") => {
            let role = item.required_string("role")?;
            let role = if role == "developer" { "system" } else { role };
            let author = if role == "assistant" { Author::Answer } else { Author::Message };
            item.required("content")?;
            dialogue.text(role, parts::content(item, "content", author)?);
        }
        Some("reasoning") => add_reasoning(dialogue, item)?,
        Some("function_call") => {
            let name = flat_name(item.string("namespace"), item.required_string("name")?);
            dialogue.call(item.required_string("call_id")?, &name, item.required("arguments")?);
        }
        // A tool that takes a text instead of arguments.
        Some("custom_tool_call") => {
            let input = json!({"input": item.required_string("input")?});
            dialogue.call(item.required_string("call_id")?, item.required_string("name")?, &input);
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let id = item.required_string("call_id")?;
            item.required("output")?;
            dialogue.result(id, None, parts::content(item, "output", Author::Tool)?);
        }
        Some(kind) if SERVER_ITEMS.contains(&kind) => {
            notes.push(format!("items of the type '{kind}' are not part of the prompt"));
        }
        Some(other) => {
            let name = item.name("type");
            let message =
                format!("Invalid value for '{name}': items of the type '{}' are not supported.", excerpt(other));
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// The reasoning itself if the item has it, otherwise its summary.
fn add_reasoning(dialogue: &mut Dialogue, item: &Fields) -> Result<()> {
    for field in ["content", "summary"] {
        let parts = item.objects(field)?;
        let texts = parts.iter().map(|part| part.required_string("text")).collect::<Result<Vec<_>>>()?;
        if !texts.is_empty() {
            dialogue.reasoning(&texts.join("\n"));
            break;
        }
    }
    Ok(())
}

/// The tools in the form of a chat.
fn tools(fields: &Fields) -> Result<OfferedTools> {
    let mut offered = OfferedTools::default();
    fields.objects("tools")?.iter().try_for_each(|tool| offer(&mut offered, tool, None))?;
    let choice = match fields.get("tool_choice") {
        Some(Value::Object(_)) => {
            fields.object("tool_choice")?.map(|choice| choice_of(&offered, &choice)).transpose()?
        }
        other => other.cloned(),
    };
    offered.choose(choice, fields.boolean("parallel_tool_calls"));
    Ok(offered)
}

/// Offers a function, or all functions of a namespace.
fn offer(offered: &mut OfferedTools, tool: &Fields, namespace: Option<&str>) -> Result<()> {
    match (tool.required_string("type")?, namespace) {
        ("function", _) => {}
        ("namespace", None) => {
            let name = tool.required_string("name")?;
            return tool.objects("tools")?.iter().try_for_each(|inner| offer(offered, inner, Some(name)));
        }
        (other, _) => {
            offered.skip(other, tool.string("name"));
            return Ok(());
        }
    }
    let name = tool.required_string("name")?;
    let flat = flat_name(namespace, name);
    if let Some(namespace) = namespace {
        offered.namespaces.insert(flat.clone(), (namespace.to_owned(), name.to_owned()));
    }
    let mut function = json!({"name": flat});
    for field in ["description", "parameters", "strict"] {
        if let Some(value) = tool.get(field) {
            function[field] = value.clone();
        }
    }
    offered.add(function);
    Ok(())
}

/// A choice by name, or of a type of tools that were left out.
fn choice_of(offered: &OfferedTools, choice: &Fields) -> Result<Value> {
    match choice.required_string("type")? {
        "function" => {
            let name = flat_name(choice.string("namespace"), choice.required_string("name")?);
            Ok(offered.named(&name))
        }
        kind if offered.named(kind) == "auto" => Ok(json!("auto")),
        other => {
            let message =
                format!("'tool_choice' of the type '{}' is not supported; only 'function' is.", excerpt(other));
            Err(ApiError::unsupported("tool_choice.type", message))
        }
    }
}

/// The fields that a response repeats, with the values that stand for absent ones.
fn echo(fields: &Fields) -> Result<Map<String, Value>> {
    let reasoning = fields.object("reasoning")?.and_then(|reasoning| reasoning.get("effort").cloned());
    let format = fields.object("text")?.and_then(|text| text.get("format").cloned());
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("max_tool_calls", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("temperature", Value::Null),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", Value::Null),
        ("user", Value::Null),
    ];
    let echoed = defaults.map(|(field, default)| (field.to_owned(), fields.get(field).cloned().unwrap_or(default)));
    let fixed = [
        ("reasoning", json!({"effort": reasoning, "summary": null})),
        ("text", json!({"format": format.unwrap_or_else(|| json!({"type": "text"}))})),
        ("background", json!(false)),
        ("service_tier", json!("default")),
        ("store", json!(false)),
        ("top_logprobs", json!(0)),
        ("truncation", json!("disabled")),
    ];
    Ok(echoed.into_iter().chain(fixed.map(|(field, value)| (field.to_owned(), value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value) -> Result<ResponsesRequest> {
        ResponsesRequest::parse(body.to_string().as_bytes())
    }

    fn with(field: &str, value: Value) -> Value {
        let mut body = json!({"input": "hi"});
        body[field] = value;
        body
    }

    #[test]
    fn items_become_messages() {
        let body = json!({
            "model": "m", "instructions": "Be brief.", "max_output_tokens": 7, "temperature": 0.5, "stream": true,
            "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "store": true, "include": [],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true}],
            "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\": 1}"},
                {"type": "function_call_output", "call_id": "c1", "output": "42"},
                {"type": "message", "role": "developer", "content": "Now."},
            ],
        });
        let ResponsesRequest { chat, echo, .. } = parse(&body).unwrap();
        let params = chat.params;
        assert_eq!((params.max_tokens, params.stream, params.choices), (Some(7), true, 1));
        assert_eq!(params.format.unwrap().format, TextFormat::JsonSchema(json!({"type": "object"})));
        assert_eq!((&chat.extra["reasoning_effort"], &echo["metadata"]), (&json!("low"), &json!({"a": "b"})));
        let tools = chat.tools.unwrap();
        assert_eq!((tools.list[0]["function"]["name"].as_str(), tools.parallel), (Some("f"), false));
        let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let want = [
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "a\nb"}),
            json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}),
            json!({"role": "tool", "content": "42", "tool_call_id": "c1"}),
            json!({"role": "system", "content": "Now."}),
        ];
        assert_eq!(chat.messages, want);
    }

    #[test]
    fn functions_of_a_namespace_are_offered_flat() {
        let function = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
        let body = json!({
            "input": [
                {"role": "user", "content": "Go."},
                {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "spawn", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c",
                 "output": [{"type": "input_image", "image_url": "data:image/png;base64,"}]},
                {"type": "web_search_call", "id": "w", "status": "completed"},
            ],
            "tools": [
                function("shell"), {"type": "namespace", "name": "agents", "tools": [function("spawn"), function("wait")]},
                {"type": "web_search", "external_web_access": true},
            ],
            "tool_choice": {"type": "function", "namespace": "agents", "name": "wait"}, "unheard_of": 1,
        });
        let ResponsesRequest { chat, namespaces, .. } = parse(&body).unwrap();
        let tools = chat.tools.unwrap();
        let names: Vec<&str> = tools.schemas.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["shell", "agents__spawn", "agents__wait"]);
        assert_eq!(tools.forced().unwrap()[0].name, "agents__wait");
        assert_eq!(namespaces["agents__spawn"], ("agents".to_owned(), "spawn".to_owned()));
        assert_eq!(chat.messages[1]["tool_calls"][0]["function"]["name"], "agents__spawn");
        assert_eq!(chat.messages[2]["content"], json!([{"type": "image", "index": 0}]));
        assert_eq!((chat.images.len(), chat.images[0].field.as_str()), (1, "input[2].output[0]"));
        assert_eq!(chat.params.notes.len(), 3, "{:?}", chat.params.notes);
        let only = json!({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}});
        assert_eq!(parse(&only).unwrap().chat.tools, None);
    }

    #[test]
    fn null_counts_as_absent() {
        let mut body = with("instructions", Value::Null);
        for field in ["model", "tools", "tool_choice", "text", "reasoning", "previous_response_id", "metadata", "top_p"]
        {
            body[field] = Value::Null;
        }
        assert_eq!(parse(&body).unwrap(), parse(&json!({"input": "hi"})).unwrap());
    }

    #[test]
    fn errors_name_the_field() {
        for (field, value, param) in [
            ("input", Value::Null, "input"),
            ("input", json!([]), "input"),
            ("input", json!(5), "input"),
            ("input", json!([{"role": "user"}]), "input[0].content"),
            ("input", json!([{"role": "judge", "content": "x"}]), "input[0].role"),
            ("input", json!([{"role": "user", "content": [{"type": "input_file"}]}]), "input[0].content[0]"),
            ("input", json!([{"role": "assistant", "content": [{"type": "input_image"}]}]), "input[0].content[0]"),
            ("input", json!([{"type": "item_reference", "id": "x"}]), "input[0].type"),
            ("input", json!([{"type": "function_call", "call_id": "a", "name": "f"}]), "input[0].arguments"),
            ("input", json!([{"type": "function_call_output", "call_id": "a", "output": 5}]), "input[0].output"),
            ("previous_response_id", json!("resp_1"), "previous_response_id"),
            ("conversation", json!("conv_1"), "conversation"),
            ("background", json!(true), "background"),
            ("tools", json!([{"type": "function"}]), "tools[0].name"),
            ("tool_choice", json!({"type": "web_search"}), "tool_choice.type"),
            ("mirostat", json!(2), "mirostat"),
            ("tool_choice", json!({"type": "function", "name": "g"}), "tool_choice"),
            ("text", json!({"format": {"type": "xml"}}), "text.format.type"),
            ("text", json!({"format": {"type": "json_schema"}}), "text.format.schema"),
            ("max_output_tokens", json!(0), "max_output_tokens"),
        ] {
            let error = parse(&with(field, value.clone())).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{value}: {error}");
        }
    }
}
