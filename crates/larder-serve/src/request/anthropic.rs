//! The body of Anthropic's `/v1/messages`, as a chat.

use std::sync::Arc;

use larder_text::TextFormat;
use serde_json::{Map, Value, json};

use super::author::Author;
use super::content::Content;
use super::context::CONTEXT_FULL;
use super::dialogue::Dialogue;
use super::fields::Fields;
use super::format::SCHEMA;
use super::image::{IMAGE_FIELDS, RequestImage};
use super::neutral::Neutral;
use super::parts::{self, CONTENT, PART_FIELDS};
use super::settings::{self, EFFORT, MODEL, REPETITION_PENALTY, SAMPLING, STOPS, STREAM, TEMPLATE_KWARGS};
use super::table::{Field, Kind, Object, field};
use super::tools::OfferedTools;
use super::unsupported::{IGNORED, METADATA, UNSUPPORTED, refused, unread};
use super::{ChatRequest, GenerationParams, RequestedFormat};
use crate::error::{ApiError, Result};

/// The fields of `/v1/messages`.
pub static ANTHROPIC: Object = Object {
    name: "MessagesRequest",
    groups: &[
        &[field("max_tokens", Kind::Integer(1, u32::MAX as i128), "limit of the answer").required()],
        BODY,
        SAMPLING,
        UNSUPPORTED,
        IGNORED,
        METADATA,
    ],
};

/// The fields of `/v1/messages/count_tokens`, which has no limit of tokens.
pub static ANTHROPIC_COUNT: Object =
    Object { name: "CountTokensRequest", groups: &[BODY, SAMPLING, UNSUPPORTED, IGNORED, METADATA] };

const BODY: &[Field] = &[
    MODEL,
    field("messages", Kind::Objects(&MESSAGE), "the dialogue; an assistant's message as the last is continued")
        .required(),
    field("system", CONTENT, "a system message before the others"),
    field("stop_sequences", STOPS, "up to 64 texts that end the answer"),
    STREAM,
    REPETITION_PENALTY,
    field("tools", Kind::Objects(&TOOL), "tools; those of Anthropic's servers are not offered to the model"),
    field("tool_choice", Kind::Object(&TOOL_CHOICE), "whether tools are called"),
    field("thinking", Kind::Object(&THINKING), "passed to the chat template as `enable_thinking`"),
    field("output_config", Kind::Object(&OUTPUT_CONFIG), "effort and format of the answer"),
    field("context_management", Kind::Object(&CONTEXT_MANAGEMENT), "refused unless it keeps all thinking"),
    refused("mcp_servers", Neutral::Empty, "this server calls no tools itself"),
    refused("container", Neutral::Empty, "this server runs no code"),
    CONTEXT_FULL,
    EFFORT,
    TEMPLATE_KWARGS,
];

static MESSAGE: Object = Object {
    name: "AnthropicMessage",
    groups: &[&[
        field("role", Kind::Choice(&["user", "assistant", "system"]), "its author").required(),
        field("content", Kind::Either(&[Kind::Text, Kind::Objects(&BLOCK)]), "a text, or blocks").required(),
    ]],
};

static BLOCK: Object = Object {
    name: "AnthropicBlock",
    groups: &[
        PART_FIELDS,
        IMAGE_FIELDS,
        &[
            field("thinking", Kind::Text, "the text of `thinking`"),
            field("id", Kind::Text, "the id of `tool_use`"),
            field("name", Kind::Text, "its tool"),
            field("input", Kind::Map, "its arguments"),
            field("tool_use_id", Kind::Text, "the call of `tool_result`"),
            field("content", Kind::Either(&[CONTENT, Kind::Map]), "its text, or that of `search_result`"),
            field("is_error", Kind::Flag(false), "whether the call failed"),
        ],
    ],
};

static TOOL: Object = Object {
    name: "AnthropicTool",
    groups: &[&[
        field("name", Kind::Text, "its name").required(),
        field("type", Kind::Text, "`custom`; tools of other types are not offered to the model"),
        field("description", Kind::Text, "passed to the chat template"),
        field("input_schema", Kind::Map, "a JSON Schema of its arguments"),
    ]],
};

static TOOL_CHOICE: Object = Object {
    name: "AnthropicToolChoice",
    groups: &[&[
        field("type", Kind::Choice(&["auto", "any", "tool", "none"]), "whether tools are called").required(),
        field("name", Kind::Text, "the tool of `tool`"),
        field("disable_parallel_tool_use", Kind::Boolean, "at most one call where calls are forced"),
    ]],
};

static THINKING: Object = Object {
    name: "AnthropicThinking",
    groups: &[&[
        field("type", Kind::Choice(&["enabled", "adaptive", "disabled"]), "whether to reason").required(),
        unread("budget_tokens", "ignored: no budget is enforced"),
    ]],
};

static OUTPUT_CONFIG: Object = Object {
    name: "AnthropicOutputConfig",
    groups: &[&[
        field("effort", Kind::Text, "passed to the chat template as `reasoning_effort`"),
        field("format", Kind::Object(&OUTPUT_FORMAT), "what the answer has to match"),
    ]],
};

static OUTPUT_FORMAT: Object = Object {
    name: "AnthropicOutputFormat",
    groups: &[&[
        field("type", Kind::Choice(&["json_schema"]), "JSON").required(),
        field("schema", SCHEMA, "a JSON Schema").required(),
    ]],
};

static CONTEXT_MANAGEMENT: Object = Object {
    name: "AnthropicContextManagement",
    groups: &[&[field("edits", Kind::Objects(&EDIT), "edits of the history")]],
};

static EDIT: Object = Object {
    name: "AnthropicContextEdit",
    groups: &[&[
        field("type", Kind::Text, "only `clear_thinking_20251015`").required(),
        field("keep", Kind::Any, "only `all`"),
    ]],
};

impl ChatRequest {
    /// Parses the body of `/v1/messages`.
    pub fn parse_anthropic(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "", &ANTHROPIC)?;
        let mut chat = chat(&fields)?;
        chat.params = GenerationParams { max_tokens: fields.count("max_tokens"), ..chat.params };
        Ok(chat)
    }

    /// Parses the body of `/v1/messages/count_tokens`, which has no limit of tokens.
    pub fn parse_anthropic_count(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        chat(&Fields::of(&json, "", &ANTHROPIC_COUNT)?)
    }
}

fn chat(fields: &Fields) -> Result<ChatRequest> {
    check_context_edits(fields)?;
    let (messages, images, continues) = messages(fields)?;
    let offered = tools(fields)?;
    let mut params = GenerationParams {
        stop: settings::stop_strings(fields, "stop_sequences")?,
        format: format(fields)?,
        ..settings::shared_params(fields, fields, &["repetition_penalty"])
    };
    let (tools, extra) = (offered.requested()?, extra(fields)?);
    params.notes = offered.notes.into_iter().chain(fields.unknown()).collect();
    let chat = ChatRequest { params, messages, images, continues, tools, extra, ..ChatRequest::default() };
    Ok(ChatRequest { separate_reasoning: true, ..chat })
}

/// Edits of the history, of which this server makes none: reasoning is in the prompt as far as the chat template prints
/// it.
fn check_context_edits(fields: &Fields) -> Result<()> {
    let Some(management) = fields.object("context_management")? else { return Ok(()) };
    for edit in management.objects("edits")? {
        let keeps_all = edit.get("keep").is_some_and(|keep| keep == "all" || keep["type"] == "all");
        let kind = edit.required_string("type")?;
        if kind != "clear_thinking_20251015" || !keeps_all {
            let message = format!("'{}' is not supported: only clear_thinking_20251015 that keeps all.", edit.path());
            return Err(ApiError::unsupported(edit.path(), message));
        }
    }
    Ok(())
}

/// The schema of the answer in `output_config`.
fn format(fields: &Fields) -> Result<Option<RequestedFormat>> {
    let Some(config) = fields.object("output_config")? else { return Ok(None) };
    let Some(format) = config.object("format")? else { return Ok(None) };
    let format = TextFormat::JsonSchema(format.required("schema")?.clone());
    Ok(Some(RequestedFormat { field: "output_config.format", format }))
}

fn extra(fields: &Fields) -> Result<Map<String, Value>> {
    let effort = fields.object("output_config")?.and_then(|config| config.string("effort"));
    let mut extra = settings::extra(fields, effort);
    if let Some(thinking) = fields.object("thinking")? {
        extra.entry("enable_thinking").or_insert((thinking.string("type") != Some("disabled")).into());
    }
    Ok(extra)
}

/// The messages with their images, and whether the answer continues the last of them, an assistant's.
fn messages(fields: &Fields) -> Result<(Vec<Value>, Vec<Arc<RequestImage>>, bool)> {
    let mut dialogue = Dialogue::default();
    if fields.get("system").is_some() {
        dialogue.text("system", parts::content(fields, "system", Author::Message)?);
    }
    let list = fields.objects("messages")?;
    list.iter().try_for_each(|message| add_message(&mut dialogue, message))?;
    if list.is_empty() {
        return Err(Dialogue::empty("messages"));
    }
    let (messages, images) = dialogue.finish("messages")?;
    let continues = messages.last().is_some_and(|last| last["role"] == "assistant");
    Ok((messages, images, continues))
}

fn add_message(dialogue: &mut Dialogue, message: &Fields) -> Result<()> {
    let role = message.required_string("role")?;
    if let Some(text) = message.required("content")?.as_str() {
        dialogue.text(role, text);
        return Ok(());
    }
    // All blocks between results of tools are one message.
    let author = if role == "assistant" { Author::Answer } else { Author::Message };
    let mut said: Option<Content> = None;
    for block in message.objects("content")? {
        match (role, block.required_string("type")?) {
            ("assistant", kind) if kind != "text" => {
                flush(dialogue, role, &mut said);
                add_assistant_block(dialogue, kind, &block)?;
            }
            ("user", "tool_result") => {
                flush(dialogue, role, &mut said);
                add_result(dialogue, &block)?;
            }
            _ => said.get_or_insert_default().push(parts::part(&block, author)?),
        }
    }
    flush(dialogue, role, &mut said);
    Ok(())
}

fn flush(dialogue: &mut Dialogue, role: &str, said: &mut Option<Content>) {
    if let Some(said) = said.take() {
        dialogue.text(role, said);
    }
}

fn add_assistant_block(dialogue: &mut Dialogue, kind: &str, block: &Fields) -> Result<()> {
    match kind {
        "thinking" => dialogue.reasoning(block.required_string("thinking")?),
        "tool_use" => {
            let (id, name) = (block.required_string("id")?, block.required_string("name")?);
            dialogue.call(id, name, block.required("input")?);
        }
        // Reasoning that only its author's servers can read, and what those servers' own tools did.
        "redacted_thinking" | "server_tool_use" | "mcp_tool_use" => {}
        kind if kind.ends_with("_tool_result") => {}
        _ => dialogue.text("assistant", parts::part(block, Author::Answer)?),
    }
    Ok(())
}

fn add_result(dialogue: &mut Dialogue, block: &Fields) -> Result<()> {
    let mut content = parts::content(block, "content", Author::Tool)?;
    if block.flag("is_error") {
        content = content.prefixed("Error: ");
    }
    dialogue.result(block.required_string("tool_use_id")?, None, content);
    Ok(())
}

/// The tools in OpenAI's form.
fn tools(fields: &Fields) -> Result<OfferedTools> {
    let mut offered = OfferedTools::default();
    fields.objects("tools")?.iter().try_for_each(|tool| offer(&mut offered, tool))?;
    let Some(choice) = fields.object("tool_choice")? else { return Ok(offered) };
    let choose = match choice.required_string("type")? {
        "tool" => offered.named(choice.required_string("name")?),
        kind => json!(kind),
    };
    let parallel = choice.boolean("disable_parallel_tool_use").map(|disabled| !disabled);
    offered.choose(Some(choose), parallel);
    Ok(offered)
}

fn offer(offered: &mut OfferedTools, tool: &Fields) -> Result<()> {
    let name = tool.required_string("name")?;
    if let Some(kind) = tool.string("type").filter(|kind| *kind != "custom") {
        offered.skip(kind, Some(name));
        return Ok(());
    }
    let schema = tool.required("input_schema")?;
    let mut function = json!({"name": name});
    if let Some(description) = tool.string("description") {
        function["description"] = description.into();
    }
    function["parameters"] = schema.clone();
    offered.add(function);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value) -> Result<ChatRequest> {
        ChatRequest::parse_anthropic(body.to_string().as_bytes())
    }

    fn with(field: &str, value: Value) -> Value {
        let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        body[field] = value;
        body
    }

    #[test]
    fn turns_become_messages() {
        let body = json!({
            "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "temperature": 0.5, "top_k": 2, "stop_sequences": ["x"], "stream": true, "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "no"}],
                     "is_error": true},
                    {"type": "text", "text": "and?"},
                ]},
            ],
        });
        let ChatRequest { params, messages, tools, extra, .. } = parse(&body).unwrap();
        assert_eq!((params.max_tokens, params.stop.len(), params.stream, params.choices), (Some(9), 1, true, 1));
        assert_eq!((&extra["enable_thinking"], &extra["reasoning_effort"]), (&json!(true), &json!("low")));
        assert_eq!(params.format.unwrap().format, TextFormat::JsonSchema(json!({})));
        let tools = tools.unwrap();
        assert_eq!((tools.forced().unwrap().len(), tools.parallel), (1, false));
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        assert_eq!(tools.list, [json!({"type": "function", "function": function})]);
        let call = json!({"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        let want = [
            json!({"role": "system", "content": "a\nb"}),
            json!({"role": "user", "content": "hi"}),
            json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}),
            json!({"role": "tool", "content": "Error: no", "tool_call_id": "t1"}),
            json!({"role": "user", "content": "and?"}),
        ];
        assert_eq!(messages, want);
    }

    #[test]
    fn what_agents_send_is_read() {
        let body = json!({
            "max_tokens": 32000.0, "top_k": -1, "betas": ["x"], "diagnostics": {"a": 1}, "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stop_sequences": vec!["x"; 64],
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            "tool_choice": {"type": "tool", "name": "web_search"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "Agents: none."},
                {"role": "assistant", "content": [
                    {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "I search."},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "tool_use", "id": "t", "name": "find", "input": {}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                    {"type": "tool_reference", "tool_name": "grep"}, {"type": "image", "source": {}},
                ]}]},
                {"role": "assistant", "content": "Found"},
            ],
        });
        let ChatRequest { params, messages, tools, continues, .. } = parse(&body).unwrap();
        assert_eq!((params.max_tokens, params.stop.len(), tools, continues), (Some(32000), 64, None, true));
        let call = json!({"id": "t", "type": "function", "function": {"name": "find", "arguments": {}}});
        let seen = json!([{"type": "text", "text": "grep"}, {"type": "image", "index": 0}]);
        let want = [
            json!({"role": "user", "content": "hi"}),
            json!({"role": "system", "content": "Agents: none."}),
            json!({"role": "assistant", "content": "I search.", "tool_calls": [call]}),
            json!({"role": "tool", "content": seen, "tool_call_id": "t"}),
            json!({"role": "assistant", "content": "Found"}),
        ];
        assert_eq!(messages, want);
        assert_eq!(params.notes.len(), 2, "{:?}", params.notes);
        let plain = json!({"max_tokens": 32000, "messages": [{"role": "user", "content": "hi"}]});
        assert_eq!(parse(&plain).unwrap().messages, messages[..1]);
    }

    #[test]
    fn null_counts_as_absent() {
        let mut body = with("system", Value::Null);
        for field in ["model", "temperature", "stop_sequences", "tools", "tool_choice", "thinking", "stream"] {
            body[field] = Value::Null;
        }
        assert_eq!(parse(&body).unwrap(), parse(&with("metadata", json!({}))).unwrap());
    }

    #[test]
    fn errors_name_the_field() {
        let block = |block: Value| json!([{"role": "user", "content": [block]}]);
        let text = json!({"type": "text", "text": "x"});
        for (field, value, param) in [
            ("max_tokens", Value::Null, "max_tokens"),
            ("max_tokens", json!(0), "max_tokens"),
            ("messages", json!([]), "messages"),
            ("messages", json!([{"role": "judge", "content": "x"}]), "messages[0].role"),
            ("messages", block(json!({"type": "file", "source": {}})), "messages[0].content[0]"),
            ("messages", block(json!({"type": "text"})), "messages[0].content[0].text"),
            ("messages", block(json!({"type": "tool_use", "id": "a"})), "messages[0].content[0]"),
            ("system", json!(5), "system"),
            ("system", json!([text, {"type": "file"}]), "system[1]"),
            ("stop_sequences", json!([""]), "stop_sequences"),
            ("stop_sequences", json!(vec!["a"; 65]), "stop_sequences"),
            ("thinking", json!({"type": "deep"}), "thinking.type"),
            ("output_config", json!({"format": {"type": "xml"}}), "output_config.format.type"),
            ("tools", json!([{"name": "f"}]), "tools[0].input_schema"),
            ("tool_choice", json!({"type": "some"}), "tool_choice.type"),
            ("tool_choice", json!({"type": "tool", "name": "g"}), "tool_choice"),
            ("mcp_servers", json!([{}]), "mcp_servers"),
            (
                "context_management",
                json!({"edits": [{"type": "clear_tool_uses_20250919"}]}),
                "context_management.edits[0]",
            ),
            ("dry_multiplier", json!(0.8), "dry_multiplier"),
        ] {
            let error = parse(&with(field, value.clone())).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{value}: {error}");
        }
        let mut body = with("stream", json!(false));
        body.as_object_mut().unwrap().remove("max_tokens");
        assert!(ChatRequest::parse_anthropic_count(body.to_string().as_bytes()).is_ok());
    }
}
