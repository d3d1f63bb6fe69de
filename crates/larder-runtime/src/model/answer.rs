//! The answer of a chat as a message.

use larder_text::OutputPart;
use serde_json::{Value, json};

/// An answer in its parts.
#[derive(Default)]
pub(crate) struct AnswerMessage {
    pub content: String,
    reasoning: String,
    calls: Vec<ToolCall>,
}

struct ToolCall {
    name: String,
    id: Option<String>,
    arguments: String,
}

impl AnswerMessage {
    /// Adds a part.
    pub fn add(&mut self, part: &OutputPart) {
        match part {
            OutputPart::Content(text) => self.content.push_str(text),
            OutputPart::Reasoning(text) => self.reasoning.push_str(text),
            OutputPart::CallName { name, id } => {
                self.calls.push(ToolCall { name: name.clone(), id: id.clone(), arguments: String::new() });
            }
            OutputPart::CallArguments(text) => {
                self.calls.last_mut().into_iter().for_each(|call| call.arguments.push_str(text));
            }
        }
    }

    /// The message in OpenAI's form.
    pub fn json(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            let call = |(at, call): (usize, &ToolCall)| {
                let id = call.id.clone().unwrap_or_else(|| format!("call_{at}"));
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": id, "type": "function", "function": function})
            };
            message["tool_calls"] = self.calls.iter().enumerate().map(call).collect();
        }
        message
    }
}
