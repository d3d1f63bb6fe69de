//! The messages of a chat, from OpenAI's format to the one that chat templates read.

use serde_json::{Map, Value};

use super::fields::{Fields, wrong_type};
use crate::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// The messages, each with a role that templates know, its content as one string and tool-call arguments as objects.
pub fn read(value: &Value) -> Result<Vec<Value>> {
    let Value::Array(list) = value else { return Err(wrong_type("messages", "an array of objects", value)) };
    if list.is_empty() {
        let message = "Invalid 'messages': empty array; expected at least one message.";
        return Err(ApiError::invalid_field("messages", "empty_array", message));
    }
    list.iter().enumerate().map(|(i, message)| one(message, &format!("messages[{i}]"))).collect()
}

fn one(value: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(value, path)?;
    let name = fields.name("role");
    let Some(role) = fields.required("role")?.as_str() else {
        return Err(wrong_type(&name, "a string", fields.required("role")?));
    };
    let role = match role {
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => role,
        other => {
            let known = "system, developer, user, assistant, tool";
            let message = format!("Invalid value for '{name}': '{other}' is not one of {known}.");
            return Err(ApiError::invalid_field(name, "invalid_value", message));
        }
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content(&fields, role)?);
    for field in ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"] {
        if let Some(text) = fields.string(field)? {
            message.insert(field.into(), text.into());
        }
    }
    if let Some(calls) = fields.array("tool_calls")? {
        let calls = calls.iter().enumerate().map(|(i, call)| tool_call(call, &format!("{path}.tool_calls[{i}]")));
        message.insert("tool_calls".into(), calls.collect::<Result<Vec<_>>>()?.into());
    }
    Ok(Value::Object(message))
}

/// The content as one string; an assistant's may be missing, as with tool calls.
pub fn content(fields: &Fields, role: &str) -> Result<Value> {
    let name = fields.name("content");
    match fields.get("content") {
        None if role == "assistant" => Ok("".into()),
        None => fields.required("content").cloned(),
        Some(Value::String(text)) => Ok(text.as_str().into()),
        Some(Value::Array(parts)) => {
            let text = |(i, part)| text_of(part, &format!("{name}[{i}]"));
            let texts = parts.iter().enumerate().map(text).collect::<Result<Vec<_>>>()?;
            Ok(texts.join("\n").into())
        }
        Some(other) => Err(wrong_type(&name, "a string or an array of text parts", other)),
    }
}

fn text_of<'a>(part: &'a Value, path: &str) -> Result<&'a str> {
    let fields = Fields::of(part, path)?;
    let field = match fields.string("type")? {
        None | Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some(other) => {
            let message = format!("Invalid value for '{path}': only text content is supported, not '{other}'.");
            return Err(ApiError::unsupported(path, message));
        }
    };
    let text = fields.required(field)?;
    text.as_str().ok_or_else(|| wrong_type(&fields.name(field), "a string", text))
}

/// Clients send arguments as a string of JSON, and templates expect an object.
fn tool_call(call: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(call, path)?;
    let function = Fields::of(fields.required("function")?, &fields.name("function"))?;
    function.required("name")?;
    let mut call = call.clone();
    let arguments = function.get("arguments").and_then(Value::as_str).and_then(|text| serde_json::from_str(text).ok());
    if let Some(object @ Value::Object(_)) = arguments {
        call["function"]["arguments"] = object;
    }
    Ok(call)
}
