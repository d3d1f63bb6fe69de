//! The body of Anthropic's `/v1/messages`, as a chat.

use larder_engine::TextFormat;
use serde_json::{Map, Value, json};

use super::dialogue::{Dialogue, optional_text, required_string, role};
use super::fields::{Fields, wrong_type};
use super::{ChatRequest, GenerationParams, RequestedFormat, RequestedTools, STOPS_MAX};
use crate::error::ApiError;

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
        ("context_management", "'context_management' is not supported."),
    ] {
        super::reject_unless_empty(fields, field, why)?;
    }
    let params = GenerationParams {
        choices: 1,
        model: fields.string("model")?.map(str::to_owned),
        sampling: super::sampling_params(fields)?,
        seed: super::seed(fields)?,
        stop: super::stop_strings(fields, "stop_sequences", STOPS_MAX)?,
        stream: fields.boolean("stream")?.unwrap_or(false),
        context_full: super::context::context_full(fields)?,
        format: format(fields)?,
        ..GenerationParams::default()
    };
    let (messages, tools) = (messages(fields)?, tools(fields)?);
    Ok(ChatRequest { params, messages, tools, separate_reasoning: true, extra: extra(fields)? })
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
                let message = format!("Invalid value for 'thinking.type': '{other}' is not one of enabled, disabled.");
                return Err(ApiError::invalid_field("thinking.type", "invalid_value", message));
            }
        };
        extra.entry("enable_thinking").or_insert(enabled.into());
    }
    Ok(extra)
}

fn messages(fields: &Fields) -> Result<Vec<Value>> {
    let mut dialogue = Dialogue::default();
    if let Some(system) = fields.get("system") {
        let part = json!({"content": system});
        let text = optional_text(&Fields::of(&part, "")?)
            .map_err(|_| wrong_type("system", "a string or an array of text blocks", system))?;
        dialogue.text("system", &text);
    }
    let list = fields.required("messages")?;
    let Value::Array(list) = list else { return Err(wrong_type("messages", "an array of objects", list)) };
    for (i, message) in list.iter().enumerate() {
        add_message(&mut dialogue, &Fields::of(message, &format!("messages[{i}]"))?)?;
    }
    if list.is_empty() {
        return Dialogue::default().finish("messages");
    }
    if dialogue.last_role() == Some("assistant") {
        let message = "An answer cannot be begun by the request: the last message must have the role 'user'.";
        return Err(ApiError::unsupported("messages", message));
    }
    dialogue.finish("messages")
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
    let mut texts: Vec<&str> = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let block = Fields::of(block, &message.name(&format!("content[{i}]")))?;
        match (role, required_string(&block, "type")?) {
            (_, "text") => texts.push(required_string(&block, "text")?),
            ("assistant", other) => {
                flush(dialogue, role, &mut texts);
                add_assistant_block(dialogue, other, &block)?;
            }
            ("user", "tool_result") => {
                flush(dialogue, role, &mut texts);
                add_result(dialogue, &block)?;
            }
            (_, other) => return Err(unsupported(&block, other)),
        }
    }
    flush(dialogue, role, &mut texts);
    Ok(())
}

fn flush(dialogue: &mut Dialogue, role: &str, texts: &mut Vec<&str>) {
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
        other => return Err(unsupported(block, other)),
    }
    Ok(())
}

fn add_result(dialogue: &mut Dialogue, block: &Fields) -> Result<()> {
    let text = optional_text(block)?;
    let prefix = if block.boolean("is_error")? == Some(true) { "Error: " } else { "" };
    dialogue.result(required_string(block, "tool_use_id")?, None, &format!("{prefix}{text}"));
    Ok(())
}

fn unsupported(block: &Fields, kind: &str) -> ApiError {
    let name = block.name("type");
    let message = format!("Invalid value for '{name}': blocks of the type '{kind}' are not supported here.");
    ApiError::unsupported(name, message)
}

/// The tools in OpenAI's form.
fn tools(fields: &Fields) -> Result<Option<RequestedTools>> {
    let list = fields.array("tools")?.unwrap_or_default();
    let list = list.iter().enumerate().map(|(i, tool)| tool_of(&Fields::of(tool, &format!("tools[{i}]"))?));
    let list = list.collect::<Result<Vec<_>>>()?;
    let Some(choice) = fields.object("tool_choice")? else { return super::translated_tools(list, None, None) };
    let openai = match required_string(&choice, "type")? {
        "auto" => json!("auto"),
        "any" => json!("required"),
        "none" => json!("none"),
        "tool" => json!({"type": "function", "function": {"name": required_string(&choice, "name")?}}),
        other => {
            let message =
                format!("Invalid value for 'tool_choice.type': '{other}' is not one of auto, any, tool, none.");
            return Err(ApiError::invalid_field("tool_choice.type", "invalid_value", message));
        }
    };
    let parallel = choice.boolean("disable_parallel_tool_use")?.map(|disabled| !disabled);
    super::translated_tools(list, Some(openai), parallel)
}

fn tool_of(tool: &Fields) -> Result<Value> {
    if let Some(kind) = tool.string("type")?.filter(|kind| *kind != "custom") {
        let message =
            format!("Tools of the server, such as '{kind}', are not supported; give a name and an input_schema.");
        return Err(ApiError::unsupported(tool.name("type"), message));
    }
    let schema = tool.required("input_schema")?;
    if !schema.is_object() {
        return Err(wrong_type(&tool.name("input_schema"), "an object", schema));
    }
    let mut function = json!({"name": required_string(tool, "name")?});
    if let Some(description) = tool.string("description")? {
        function["description"] = description.into();
    }
    function["parameters"] = schema.clone();
    Ok(json!({"type": "function", "function": function}))
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
            ("messages", json!([{"role": "assistant", "content": "I"}]), "messages"),
            ("messages", block(json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
            ("messages", block(json!({"type": "text"})), "messages[0].content[0].text"),
            ("messages", block(json!({"type": "tool_use", "id": "a"})), "messages[0].content[0].type"),
            ("system", json!(5), "system"),
            ("system", json!([text, {"type": "image"}]), "system"),
            ("stop_sequences", json!([""]), "stop_sequences"),
            ("stop_sequences", json!(vec!["a"; 61]), "stop_sequences"),
            ("thinking", json!({"type": "deep"}), "thinking.type"),
            ("output_config", json!({"format": {"type": "xml"}}), "output_config.format.type"),
            ("tools", json!([{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
            ("tools", json!([{"name": "f"}]), "tools[0].input_schema"),
            ("tool_choice", json!({"type": "some"}), "tool_choice.type"),
            ("tool_choice", json!({"type": "tool", "name": "g"}), "tool_choice"),
            ("mcp_servers", json!([{}]), "mcp_servers"),
        ] {
            let error = parse(&with(field, value.clone())).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{value}: {error}");
        }
        let mut body = with("stream", json!(false));
        body.as_object_mut().unwrap().remove("max_tokens");
        assert!(ChatRequest::parse_anthropic_count(body.to_string().as_bytes()).is_ok());
    }
}
