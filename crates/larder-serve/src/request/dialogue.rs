//! The messages of a chat, built from the items of APIs that split an assistant's turn into several.

use std::sync::Arc;

use serde_json::{Value, json};

use super::content::Content;
use super::image::RequestImage;
use crate::error::{ApiError, Result};

/// Messages as chat templates read them. Reasoning, text and calls of an assistant's turn become one message.
#[derive(Default)]
pub struct Dialogue {
    messages: Vec<Value>,
    images: Vec<Arc<RequestImage>>,
    /// Reasoning before the next part of an assistant's turn.
    reasoning: String,
}

impl Dialogue {
    /// Adds what a role says, an assistant to its turn.
    pub fn text(&mut self, role: &str, content: impl Into<Content>) {
        if role != "assistant" {
            let content = content.into().into_value(&mut self.images);
            self.messages.push(json!({"role": role, "content": content}));
            return;
        }
        let text = content.into().into_text();
        let content = &mut self.turn()["content"];
        let before = content.as_str().unwrap_or_default();
        *content = if before.is_empty() { Value::from(text) } else { format!("{before}\n{text}").into() };
    }

    /// Adds reasoning.
    pub fn reasoning(&mut self, text: &str) {
        if !self.reasoning.is_empty() {
            self.reasoning.push('\n');
        }
        self.reasoning.push_str(text);
    }

    /// Adds a call of a tool; `arguments` are an object, or a string of JSON.
    pub fn call(&mut self, id: &str, name: &str, arguments: &Value) {
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()).filter(Value::is_object);
        let arguments = parsed.unwrap_or_else(|| arguments.clone());
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        match &mut self.turn()["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            none => *none = json!([call]),
        }
    }

    /// Adds the result of the call of this id.
    pub fn result(&mut self, id: &str, name: Option<&str>, content: Content) {
        let content = content.into_value(&mut self.images);
        let mut message = json!({"role": "tool", "content": content, "tool_call_id": id});
        if let Some(name) = name {
            message["name"] = name.into();
        }
        self.messages.push(message);
    }

    /// The messages, at least one, and their images; `field` is the field that they were read from.
    pub fn finish(self, field: &str) -> Result<(Vec<Value>, Vec<Arc<RequestImage>>)> {
        if self.messages.is_empty() { Err(Dialogue::empty(field)) } else { Ok((self.messages, self.images)) }
    }

    /// The error for a chat without messages.
    pub fn empty(field: &str) -> ApiError {
        let message = format!("Invalid '{field}': empty; expected at least one message.");
        ApiError::invalid_field(field, "empty_array", message)
    }

    /// The role of the last message.
    fn last_role(&self) -> Option<&str> {
        self.messages.last()?["role"].as_str()
    }

    /// The message of the assistant's turn that is being built.
    fn turn(&mut self) -> &mut Value {
        let reasoning = std::mem::take(&mut self.reasoning);
        if self.last_role() != Some("assistant") || !reasoning.is_empty() {
            let mut message = json!({"role": "assistant", "content": ""});
            if !reasoning.is_empty() {
                message["reasoning_content"] = reasoning.into();
            }
            self.messages.push(message);
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}
