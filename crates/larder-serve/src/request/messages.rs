//! The messages of a chat, from OpenAI's format to the one that chat templates read.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::author::Author;
use super::fields::Fields;
use super::image::RequestImage;
use super::parts::{CONTENT, content};
use super::table::{Kind, Object, field};
use super::unsupported::unread;
use crate::error::{ApiError, Result};

/// Roles of OpenAI's API.
const ROLES: Kind = Kind::Choice(&["system", "developer", "user", "assistant", "tool", "function"]);

/// A message of a chat.
pub static MESSAGE: Object = Object {
    name: "ChatMessage",
    groups: &[&[
        field("role", ROLES, "its author").required(),
        field("content", CONTENT, "a text, or parts: texts and images"),
        field("name", Kind::Text, "passed to the chat template"),
        field("tool_call_id", Kind::Text, "the call whose result this is"),
        field("reasoning_content", Kind::Text, "reasoning before the answer"),
        field("reasoning", Kind::Text, "another name of it"),
        field("thinking", Kind::Text, "another name of it"),
        field("function_call", Kind::Object(&FUNCTION_CALL), "an only call, in the older form"),
        field("tool_calls", Kind::Objects(&TOOL_CALL), "calls of tools"),
    ]],
};

static FUNCTION_CALL: Object = Object {
    name: "FunctionCall",
    groups: &[&[
        field("name", Kind::Text, "the tool").required(),
        field("arguments", Kind::Either(&[Kind::Text, Kind::Map]), "an object, or its JSON as a text"),
    ]],
};

static TOOL_CALL: Object = Object {
    name: "ToolCall",
    groups: &[&[
        unread("id", "passed to the chat template"),
        unread("type", "passed to the chat template"),
        field("function", Kind::Object(&FUNCTION_CALL), "the call").required(),
    ]],
};

/// The messages, each with a role that templates know, its content as one string unless it has images, which are
/// returned, too, and tool-call arguments as objects.
pub fn read(fields: &Fields) -> Result<(Vec<Value>, Vec<Arc<RequestImage>>)> {
    let list = fields.objects("messages")?;
    if list.is_empty() {
        let message = "Invalid 'messages': empty array; expected at least one message.";
        return Err(ApiError::invalid_field("messages", "empty_array", message));
    }
    let mut images = Vec::new();
    let messages = list.iter().map(|message| one(message, &mut images)).collect::<Result<_>>()?;
    Ok((messages, images))
}

fn one(fields: &Fields, images: &mut Vec<Arc<RequestImage>>) -> Result<Value> {
    let (role, author) = match fields.required_string("role")? {
        "system" | "developer" => ("system", Author::Message),
        "assistant" => ("assistant", Author::Answer),
        // The older name of a tool's result.
        "tool" | "function" => ("tool", Author::Tool),
        _ => ("user", Author::Message),
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content(fields, "content", author)?.into_value(images));
    for field in ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"] {
        if let Some(text) = fields.string(field) {
            message.insert(field.into(), text.into());
        }
    }
    // The older form of an only call.
    if let Some(function) = fields.get("function_call") {
        let call = json!({"type": "function", "function": function});
        message.insert("tool_calls".into(), json!([tool_call(&call, &fields.name("function_call"))?]));
    }
    if fields.get("tool_calls").is_some() {
        let calls = fields.array("tool_calls").iter().enumerate();
        let calls = calls.map(|(i, call)| tool_call(call, &fields.name(&format!("tool_calls[{i}]"))));
        message.insert("tool_calls".into(), calls.collect::<Result<Vec<_>>>()?.into());
    }
    Ok(Value::Object(message))
}

/// Clients send arguments as a string of JSON, and templates expect an object.
fn tool_call(call: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(call, path, &TOOL_CALL)?;
    let function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
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
