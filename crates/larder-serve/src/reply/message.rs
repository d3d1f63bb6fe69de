//! The parts of an answer: reasoning, content and tool calls.

use std::hash::{BuildHasher, RandomState};

use larder_text::{OutputParser, OutputPart};

/// An answer, or as much of it as has been generated.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AnswerMessage {
    /// Reasoning before the answer.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// Calls of tools.
    pub calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ToolCall {
    /// The model's own id, or a new one.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// JSON, complete when the answer is.
    pub arguments: String,
}

/// A new part of an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MessagePart {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A call begins: the one of this index.
    Call(usize),
    /// More arguments of the call of this index.
    Arguments(usize, String),
}

/// Builds a message from generated text.
pub struct MessageBuilder {
    /// Separates the parts; without one all text is content.
    parser: Option<Box<dyn OutputParser>>,
    /// The message so far.
    pub message: AnswerMessage,
}

impl MessageBuilder {
    /// A builder of an empty message.
    pub fn new(parser: Option<Box<dyn OutputParser>>) -> Self {
        MessageBuilder { parser, message: AnswerMessage::default() }
    }

    /// Takes generated text, and returns what is certain.
    pub fn push(&mut self, text: String) -> Vec<MessagePart> {
        let parts = match &mut self.parser {
            Some(parser) => parser.push(&text),
            None if text.is_empty() => vec![],
            None => vec![OutputPart::Content(text)],
        };
        self.add(parts)
    }

    /// Ends the text, and returns what was held back.
    pub fn finish(&mut self) -> Vec<MessagePart> {
        let parts = self.parser.as_mut().map(|parser| parser.finish()).unwrap_or_default();
        self.add(parts)
    }

    fn add(&mut self, parts: Vec<OutputPart>) -> Vec<MessagePart> {
        parts.into_iter().filter_map(|part| self.message.add(part)).collect()
    }
}

impl AnswerMessage {
    fn add(&mut self, part: OutputPart) -> Option<MessagePart> {
        match part {
            OutputPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                Some(MessagePart::Reasoning(text))
            }
            OutputPart::Content(text) => {
                self.content.push_str(&text);
                Some(MessagePart::Content(text))
            }
            OutputPart::CallName { name, id } => {
                self.calls.push(ToolCall { id: id.unwrap_or_else(call_id), name, arguments: String::new() });
                Some(MessagePart::Call(self.calls.len() - 1))
            }
            OutputPart::CallArguments(text) => {
                let index = self.calls.len().checked_sub(1)?;
                self.calls[index].arguments.push_str(&text);
                Some(MessagePart::Arguments(index, text))
            }
        }
    }
}

/// A new id of nine letters and digits, the form that Mistral's templates require.
fn call_id() -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut random = RandomState::new().hash_one(0);
    let digit = |_| {
        let digit = DIGITS[(random % 62) as usize];
        random /= 62;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_have_nine_characters() {
        let ids: std::collections::BTreeSet<String> = (0..1000).map(|_| call_id()).collect();
        assert!(
            ids.len() == 1000 && ids.iter().all(|id| id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()))
        );
    }
}
