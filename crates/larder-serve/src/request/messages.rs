//! The messages of a chat, from OpenAI's format to the one that chat templates read.

use serde_json::{Map, Value, json};

use super::dialogue::role;
use super::fields::{Fields, wrong_type};
use super::parts::{Author, content};
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
    let (role, author) = match role(&fields, &["system", "developer", "user", "assistant", "tool", "function"])? {
        "system" | "developer" => ("system", Author::Message),
        "assistant" => ("assistant", Author::Answer),
        // The older name of a tool's result.
        "tool" | "function" => ("tool", Author::Tool),
        _ => ("user", Author::Message),
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content(&fields, author)?.into());
    for field in ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"] {
        if let Some(text) = fields.string(field)? {
            message.insert(field.into(), text.into());
        }
    }
    // The older form of an only call.
    if let Some(function) = fields.get("function_call") {
        let call = json!({"type": "function", "function": function});
        message.insert("tool_calls".into(), json!([tool_call(&call, &fields.name("function_call"))?]));
    }
    if let Some(calls) = fields.array("tool_calls")? {
        let calls = calls.iter().enumerate().map(|(i, call)| tool_call(call, &format!("{path}.tool_calls[{i}]")));
        message.insert("tool_calls".into(), calls.collect::<Result<Vec<_>>>()?.into());
    }
    Ok(Value::Object(message))
}

/// Clients send arguments as a string of JSON, and templates expect an object.
fn tool_call(call: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(call, path)?;
    let function = Fields::of(fields.required("function")?, &fields.name("function"))?;
    function.required("name")?;
    let mut call = call.clone();
    match function.get("arguments") {
        None => call["function"]["arguments"] = json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => call["function"]["arguments"] = json!({}),
        Some(Value::String(text)) => {
            if let Ok(object @ Value::Object(_)) = serde_json::from_str(text) {
                call["function"]["arguments"] = object;
            }
        }
        Some(_) => {}
    }
    Ok(call)
}
