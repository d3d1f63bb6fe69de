//! The body of Anthropic's `/v1/messages`, as a chat.

use larder_text::TextFormat;
use serde_json::{Map, Value, json};

use super::dialogue::{Dialogue, required_string, role};
use super::fields::{Fields, wrong_type};
use super::parts::{self, Author};
use super::tools::OfferedTools;
use super::{ChatRequest, GenerationParams, RequestedFormat, unsupported};
use crate::error::{ApiError, excerpt};

type Result<T> = std::result::Result<T, ApiError>;

impl ChatRequest {
    /// Parses the body of `/v1/messages`.
    pub fn parse_anthropic(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        let fields = Fields::of(&json, "")?;
        fields.required("max_tokens")?;
        let max_tokens = fields.integer("max_tokens", 1..=u32::MAX.into())?;
        let mut chat = chat(&fields)?;
        chat.params = GenerationParams { max_tokens: max_tokens.map(|n| n as usize), ..chat.params };
        Ok(chat)
    }

    /// Parses the body of `/v1/messages/count_tokens`, which has no limit of tokens.
    pub fn parse_anthropic_count(body: &[u8]) -> Result<Self> {
        let json = super::json(body)?;
        chat(&Fields::of(&json, "")?)
    }
}

fn chat(fields: &Fields) -> Result<ChatRequest> {
    for (field, why) in [
        ("mcp_servers", "'mcp_servers' is not supported: this server calls no tools itself."),
        ("container", "'container' is not supported: this server runs no code."),
    ] {
        super::reject_unless_empty(fields, field, why)?;
    }
    unsupported::refuse(fields)?;
    check_context_edits(fields)?;
    let (messages, continues) = messages(fields)?;
    let offered = tools(fields)?;
    let mut params = GenerationParams {
        choices: 1,
        model: fields.string("model")?.map(str::to_owned),
        sampling: super::sampling_params(fields)?,
        seed: super::seed(fields)?,
        stop: super::stop_strings(fields, "stop_sequences")?,
        stream: fields.boolean("stream")?.unwrap_or(false),
        context_full: super::context::context_full(fields)?,
        format: format(fields)?,
        ..GenerationParams::default()
    };
    let chat = ChatRequest {
        messages,
        continues,
        tools: offered.requested()?,
        separate_reasoning: true,
        extra: extra(fields)?,
        ..ChatRequest::default()
    };
    params.notes = offered.notes.into_iter().chain(unsupported::unknown(fields)).collect();
    Ok(ChatRequest { params, ..chat })
}

/// Edits of the history, of which this server makes none: reasoning is in the prompt as far as the chat template prints it.
fn check_context_edits(fields: &Fields) -> Result<()> {
    let Some(management) = fields.object("context_management")? else { return Ok(()) };
    for (i, edit) in management.array("edits")?.unwrap_or_default().iter().enumerate() {
        let edit = Fields::of(edit, &management.name(&format!("edits[{i}]")))?;
        let keeps_all = edit.get("keep").is_some_and(|keep| keep == "all" || keep["type"] == "all");
        let kind = required_string(&edit, "type")?;
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
    match required_string(&format, "type")? {
        "json_schema" => {
            let format = TextFormat::JsonSchema(format.required("schema")?.clone());
            Ok(Some(RequestedFormat { field: "output_config.format", format }))
        }
        other => {
            let name = "output_config.format.type";
            let message = format!("Invalid value for '{name}': only json_schema is supported, not '{other}'.");
            Err(ApiError::unsupported(name, message))
        }
    }
}

fn extra(fields: &Fields) -> Result<Map<String, Value>> {
    let mut extra = super::extra(fields)?;
    if let Some(effort) = fields.object("output_config")?.map_or(Ok(None), |config| config.string("effort"))? {
        extra.entry("reasoning_effort").or_insert(effort.into());
    }
    if let Some(thinking) = fields.object("thinking")? {
        let enabled = match required_string(&thinking, "type")? {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            other => {
                let message = format!(
                    "Invalid value for 'thinking.type': '{}' is not one of enabled, adaptive, disabled.",
                    excerpt(other)
                );
                return Err(ApiError::invalid_field("thinking.type", "invalid_value", message));
            }
        };
        extra.entry("enable_thinking").or_insert(enabled.into());
    }
    Ok(extra)
}

/// The messages, and whether the answer continues the last of them, an assistant's.
fn messages(fields: &Fields) -> Result<(Vec<Value>, bool)> {
    let mut dialogue = Dialogue::default();
    if let Some(system) = fields.get("system") {
        let part = json!({"content": system});
        let text = parts::content(&Fields::of(&part, "")?, Author::Message)
            .map_err(|_| wrong_type("system", "a string or an array of text blocks", system))?;
        dialogue.text("system", &text);
    }
    let list = fields.required("messages")?;
    let Value::Array(list) = list else { return Err(wrong_type("messages", "an array of objects", list)) };
    for (i, message) in list.iter().enumerate() {
        add_message(&mut dialogue, &Fields::of(message, &format!("messages[{i}]"))?)?;
    }
    if list.is_empty() {
        return Err(Dialogue::empty("messages"));
    }
    let messages = dialogue.finish("messages")?;
    let continues = messages.last().is_some_and(|last| last["role"] == "assistant");
    Ok((messages, continues))
}

fn add_message(dialogue: &mut Dialogue, message: &Fields) -> Result<()> {
    let role = role(message, &["user", "assistant", "system"])?;
    let content = message.required("content")?;
    let Value::Array(blocks) = content else {
        let text = content.as_str();
        let name = message.name("content");
        dialogue.text(role, text.ok_or_else(|| wrong_type(&name, "a string or an array of blocks", content))?);
        return Ok(());
    };
    // The texts between results of tools are one message.
    let mut texts: Vec<String> = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let block = Fields::of(block, &message.name(&format!("content[{i}]")))?;
        match (role, required_string(&block, "type")?) {
            ("assistant", kind) if kind != "text" => {
                flush(dialogue, role, &mut texts);
                add_assistant_block(dialogue, kind, &block)?;
            }
            ("user", "tool_result") => {
                flush(dialogue, role, &mut texts);
                add_result(dialogue, &block)?;
            }
            _ => texts.push(parts::text(&block, Author::Message)?),
        }
    }
    flush(dialogue, role, &mut texts);
    Ok(())
}

fn flush(dialogue: &mut Dialogue, role: &str, texts: &mut Vec<String>) {
    if !texts.is_empty() {
        dialogue.text(role, &texts.join("\n"));
        texts.clear();
    }
}

fn add_assistant_block(dialogue: &mut Dialogue, kind: &str, block: &Fields) -> Result<()> {
    match kind {
        "thinking" => dialogue.reasoning(required_string(block, "thinking")?),
        "tool_use" => {
            let input = block.required("input")?;
            if !input.is_object() {
                return Err(wrong_type(&block.name("input"), "an object", input));
            }
            dialogue.call(required_string(block, "id")?, required_string(block, "name")?, input);
        }
        // Reasoning that only its author's servers can read, and what those servers' own tools did.
        "redacted_thinking" | "server_tool_use" | "mcp_tool_use" => {}
        kind if kind.ends_with("_tool_result") => {}
        _ => dialogue.text("assistant", &parts::text(block, Author::Answer)?),
    }
    Ok(())
}

fn add_result(dialogue: &mut Dialogue, block: &Fields) -> Result<()> {
    let text = parts::content(block, Author::Tool)?;
    let prefix = if block.boolean("is_error")? == Some(true) { "Error: " } else { "" };
    dialogue.result(required_string(block, "tool_use_id")?, None, &format!("{prefix}{text}"));
    Ok(())
}

/// The tools in OpenAI's form.
fn tools(fields: &Fields) -> Result<OfferedTools> {
    let mut offered = OfferedTools::default();
    for (i, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
        offer(&mut offered, &Fields::of(tool, &format!("tools[{i}]"))?)?;
    }
    let Some(choice) = fields.object("tool_choice")? else { return Ok(offered) };
    let choose = match required_string(&choice, "type")? {
        kind @ ("auto" | "none") => json!(kind),
        "any" => json!("required"),
        "tool" => offered.named(required_string(&choice, "name")?),
        other => {
            let message = format!(
                "Invalid value for 'tool_choice.type': '{}' is not one of auto, any, tool, none.",
                excerpt(other)
            );
            return Err(ApiError::invalid_field("tool_choice.type", "invalid_value", message));
        }
    };
    let parallel = choice.boolean("disable_parallel_tool_use")?.map(|disabled| !disabled);
    offered.choose(Some(choose), parallel);
    Ok(offered)
}

fn offer(offered: &mut OfferedTools, tool: &Fields) -> Result<()> {
    let name = required_string(tool, "name")?;
    if let Some(kind) = tool.string("type")?.filter(|kind| *kind != "custom") {
        offered.skip(kind, Some(name));
        return Ok(());
    }
    let schema = tool.required("input_schema")?;
    if !schema.is_object() {
        return Err(wrong_type(&tool.name("input_schema"), "an object", schema));
    }
    let mut function = json!({"name": name});
    if let Some(description) = tool.string("description")? {
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
        let want = [
            json!({"role": "user", "content": "hi"}),
            json!({"role": "system", "content": "Agents: none."}),
            json!({"role": "assistant", "content": "I search.", "tool_calls": [call]}),
            json!({"role": "tool", "content": "grep\n[image omitted: this model reads text]", "tool_call_id": "t"}),
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
            ("messages", block(json!({"type": "image", "source": {}})), "messages[0].content[0]"),
            ("messages", block(json!({"type": "text"})), "messages[0].content[0].text"),
            ("messages", block(json!({"type": "tool_use", "id": "a"})), "messages[0].content[0]"),
            ("system", json!(5), "system"),
            ("system", json!([text, {"type": "image"}]), "system"),
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
