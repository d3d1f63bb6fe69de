//! Responses in Ollama's format: one object, or a line of JSON for each part.

use std::time::{Duration, SystemTime};

use larder_core::rfc3339;
use larder_engine::FinishReason;
use serde_json::{Value, json};

use super::{
    Answer, AnswerMessage, CONTEXT_USE, Framing, MessagePart, ResponseEvent, ResponseFormat, ToolCall, parsed_arguments,
};
use crate::error::ApiError;
use crate::error::form::ErrorForm;
use crate::queue::job::{GenerationSummary, SampledToken};

/// The endpoint that was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OllamaEndpoint {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

/// Builds the responses to one request.
pub struct OllamaFormat {
    endpoint: OllamaEndpoint,
    model: String,
    /// The call whose arguments are being generated.
    open_call: Option<usize>,
}

impl OllamaFormat {
    /// The format of a response.
    pub fn new(endpoint: OllamaEndpoint, model: &str) -> Self {
        OllamaFormat { endpoint, model: model.to_owned(), open_call: None }
    }

    /// The answer to a request that has the model loaded, or unloaded.
    pub fn loaded(&self, unloads: bool) -> Value {
        let mut object = self.object(&AnswerMessage::default());
        object["done"] = true.into();
        object["done_reason"] = if unloads { "unload" } else { "load" }.into();
        object
    }

    fn object(&self, message: &AnswerMessage) -> Value {
        let AnswerMessage { reasoning, content, calls } = message;
        let mut object = json!({"model": self.model, "created_at": rfc3339(SystemTime::now())});
        let mut parts = match self.endpoint {
            OllamaEndpoint::Chat => json!({"role": "assistant", "content": content}),
            OllamaEndpoint::Generate => json!({"response": content}),
        };
        if !reasoning.is_empty() {
            parts["thinking"] = reasoning.as_str().into();
        }
        if !calls.is_empty() {
            parts["tool_calls"] = calls.iter().map(tool_call).collect();
        }
        match (self.endpoint, parts) {
            (OllamaEndpoint::Generate, Value::Object(parts)) => {
                parts.into_iter().for_each(|(field, value)| object[field] = value);
            }
            (_, message) => object["message"] = message,
        }
        object["done"] = false.into();
        object
    }

    /// The last object of an answer, with `message` as the rest of it.
    fn last(&self, message: &AnswerMessage, summary: &GenerationSummary) -> Value {
        let mut object = self.object(message);
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        object["done"] = true.into();
        object["done_reason"] = done_reason(summary.finish).into();
        object["total_duration"] = nanoseconds(summary.queued + summary.prefill + summary.decode).into();
        object["load_duration"] = 0.into();
        object["prompt_eval_count"] = summary.prompt_tokens.into();
        object["prompt_eval_duration"] = nanoseconds(summary.prefill).into();
        object[CONTEXT_USE] = summary.context.json();
        object["eval_count"] = summary.generated_tokens.into();
        object["eval_duration"] = nanoseconds(summary.decode).into();
        object
    }

    fn line(&self, message: AnswerMessage) -> ResponseEvent {
        ResponseEvent::unnamed(self.object(&message))
    }

    /// The line of the call that is complete now.
    fn close_call(&mut self, calls: &[ToolCall]) -> Option<ResponseEvent> {
        let call = calls.get(self.open_call.take()?)?.clone();
        Some(self.line(AnswerMessage { calls: vec![call], ..AnswerMessage::default() }))
    }
}

impl ResponseFormat for OllamaFormat {
    fn complete(&mut self, answers: &[Answer]) -> Value {
        let [answer] = answers else { return Value::Null };
        self.last(&answer.message, &answer.summary)
    }

    fn framing(&self) -> Framing {
        Framing::JsonLines
    }

    fn begin(&mut self, _: usize) -> Vec<ResponseEvent> {
        vec![]
    }

    /// Lines of text, and of each call once it is complete.
    fn parts(
        &mut self,
        _: usize,
        parts: &[MessagePart],
        message: &AnswerMessage,
        _: &[SampledToken],
    ) -> Vec<ResponseEvent> {
        let mut lines = Vec::new();
        for part in parts {
            let mut new = AnswerMessage::default();
            match part {
                MessagePart::Arguments(..) => continue,
                MessagePart::Reasoning(text) => new.reasoning.clone_from(text),
                MessagePart::Content(text) => new.content.clone_from(text),
                MessagePart::Call(index) => {
                    lines.extend(self.close_call(&message.calls));
                    self.open_call = Some(*index);
                    continue;
                }
            }
            lines.extend(self.close_call(&message.calls));
            lines.push(self.line(new));
        }
        lines
    }

    fn end(&mut self, _: usize, answer: &Answer) -> Vec<ResponseEvent> {
        let call = self.close_call(&answer.message.calls);
        let last = ResponseEvent::unnamed(self.last(&AnswerMessage::default(), &answer.summary));
        call.into_iter().chain([last]).collect()
    }

    fn failed(&self, error: &ApiError) -> ResponseEvent {
        ResponseEvent::unnamed(ErrorForm::Ollama.json(error))
    }
}

fn tool_call(ToolCall { id, name, arguments }: &ToolCall) -> Value {
    json!({"id": id, "function": {"name": name, "arguments": parsed_arguments(arguments)}})
}

fn done_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "stop",
        FinishReason::Length | FinishReason::Context => "length",
    }
}
