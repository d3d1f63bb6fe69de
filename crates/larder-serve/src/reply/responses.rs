//! Responses in the format of OpenAI's Responses API.

use std::time::{SystemTime, UNIX_EPOCH};

use larder_engine::FinishReason;
use serde_json::{Map, Value, json};

use super::blocks::{AnswerBlock, AnswerBlocks, BlockChange, BlockKind};
use super::{
    Answer, AnswerMessage, CONTEXT_USE, MessagePart, PROMPT_PROGRESS, ResponseEvent, ResponseFormat, ToolCall,
    cached_details, prompt_progress, response_id,
};
use crate::error::ApiError;
use crate::queue::job::{GenerationSummary, PrefillProgress, SampledToken};
use crate::request::Namespaces;

/// Builds the response to one request.
pub struct ResponsesFormat {
    id: String,
    created: u64,
    model: String,
    /// Fields of the request that the response repeats.
    echo: Map<String, Value>,
    /// Tools that have a namespace.
    namespaces: Namespaces,
    blocks: AnswerBlocks,
    /// Number of the next event.
    sequence: usize,
    has_begun: bool,
}

impl ResponsesFormat {
    /// The format of the response to request `number`.
    pub fn new(number: u64, model: &str, echo: Map<String, Value>, namespaces: Namespaces) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ResponsesFormat {
            id: response_id("resp_", number),
            created: now.as_secs(),
            model: model.to_owned(),
            echo,
            namespaces,
            blocks: AnswerBlocks::default(),
            sequence: 0,
            has_begun: false,
        }
    }

    fn response(&self, status: &str, output: Vec<Value>) -> Value {
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "model": self.model,
            "output": output,
            "usage": null,
        });
        for (field, value) in &self.echo {
            response[field] = value.clone();
        }
        response
    }

    /// The response at the end of an answer.
    fn ended(&self, calls: &[ToolCall], summary: &GenerationSummary) -> Value {
        let status = status(summary.finish);
        let last = self.blocks.list.len().saturating_sub(1);
        let of = |(i, block): (usize, &AnswerBlock)| {
            self.item(i, block, calls, if i == last { status } else { "completed" })
        };
        let mut response = self.response(status, self.blocks.list.iter().enumerate().map(of).collect());
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        response["usage"] = usage(summary);
        response[CONTEXT_USE] = summary.context.json();
        response
    }

    /// An item of the output; one that has just begun has no text and so no parts.
    fn item(&self, index: usize, block: &AnswerBlock, calls: &[ToolCall], status: &str) -> Value {
        let id = self.item_id(index);
        let parts: Vec<Value> = part(block).filter(|_| !block.text.is_empty()).into_iter().collect();
        match block.kind {
            BlockKind::Reasoning => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts, "status": status})
            }
            BlockKind::Text => {
                json!({"id": id, "type": "message", "role": "assistant", "content": parts, "status": status})
            }
            BlockKind::Call(call) => {
                let ToolCall { id: call_id, name, .. } = &calls[call];
                let (namespace, name) = self.name_of(name);
                let mut item = json!({
                    "id": id,
                    "type": "function_call",
                    "call_id": call_id,
                    "name": name,
                    "arguments": block.text,
                    "status": status,
                });
                if let Some(namespace) = namespace {
                    item["namespace"] = namespace.into();
                }
                item
            }
        }
    }

    /// Namespace and name of a tool, apart as the request has them.
    fn name_of<'a>(&'a self, flat: &'a str) -> (Option<&'a str>, &'a str) {
        self.namespaces.get(flat).map_or((None, flat), |(namespace, name)| (Some(namespace), name))
    }

    fn item_id(&self, index: usize) -> String {
        let prefix = match self.blocks.list[index].kind {
            BlockKind::Reasoning => "rs",
            BlockKind::Text => "msg",
            BlockKind::Call(_) => "fc",
        };
        format!("{prefix}_{}_{index}", self.id.trim_start_matches("resp_"))
    }

    fn event(&mut self, name: &'static str, mut data: Value) -> ResponseEvent {
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        ResponseEvent::typed(name, data)
    }

    fn in_progress(&mut self) -> ResponseEvent {
        let data = json!({"response": self.response("in_progress", vec![])});
        self.event("response.in_progress", data)
    }

    fn events(&mut self, changes: Vec<BlockChange>, calls: &[ToolCall], status: &str) -> Vec<ResponseEvent> {
        let of = |change| match change {
            BlockChange::Opened(index) => self.opened(index, calls),
            BlockChange::Extended(index, text) => vec![self.extended(index, &text)],
            BlockChange::Closed(index) => self.closed(index, calls, status),
        };
        changes.into_iter().flat_map(of).collect()
    }

    fn opened(&mut self, index: usize, calls: &[ToolCall]) -> Vec<ResponseEvent> {
        let empty = AnswerBlock { text: String::new(), kind: self.blocks.list[index].kind };
        let item = self.item(index, &empty, calls, "in_progress");
        let added = self.event("response.output_item.added", json!({"output_index": index, "item": item}));
        let part = part(&empty).map(|part| {
            let data = self.in_part(index, json!({"part": part}));
            self.event("response.content_part.added", data)
        });
        [Some(added), part].into_iter().flatten().collect()
    }

    fn extended(&mut self, index: usize, text: &str) -> ResponseEvent {
        let (name, data) = match self.blocks.list[index].kind {
            BlockKind::Reasoning => ("response.reasoning_text.delta", json!({"delta": text})),
            BlockKind::Text => ("response.output_text.delta", json!({"delta": text, "logprobs": []})),
            BlockKind::Call(_) => ("response.function_call_arguments.delta", json!({"delta": text})),
        };
        let data = self.in_part(index, data);
        self.event(name, data)
    }

    fn closed(&mut self, index: usize, calls: &[ToolCall], status: &str) -> Vec<ResponseEvent> {
        let block = self.blocks.list[index].clone();
        let (name, data) = match block.kind {
            BlockKind::Reasoning => ("response.reasoning_text.done", json!({"text": block.text})),
            BlockKind::Text => ("response.output_text.done", json!({"text": block.text, "logprobs": []})),
            BlockKind::Call(call) => (
                "response.function_call_arguments.done",
                json!({"name": self.name_of(&calls[call].name).1, "arguments": block.text}),
            ),
        };
        let data = self.in_part(index, data);
        let done = self.event(name, data);
        let part = part(&block).map(|part| {
            let data = self.in_part(index, json!({"part": part}));
            self.event("response.content_part.done", data)
        });
        let item = self.item(index, &block, calls, status);
        let item = self.event("response.output_item.done", json!({"output_index": index, "item": item}));
        [Some(done), part, Some(item)].into_iter().flatten().collect()
    }

    /// Adds where in the output an event belongs.
    fn in_part(&self, index: usize, mut data: Value) -> Value {
        data["item_id"] = self.item_id(index).into();
        data["output_index"] = index.into();
        if !matches!(self.blocks.list[index].kind, BlockKind::Call(_)) {
            data["content_index"] = 0.into();
        }
        data
    }
}

impl ResponseFormat for ResponsesFormat {
    fn complete(&mut self, answers: &[Answer]) -> Value {
        let [answer] = answers else { return Value::Null };
        self.blocks = AnswerBlocks::of_message(&answer.message);
        self.ended(&answer.message.calls, &answer.summary)
    }

    /// The last event of the beginning, then an event for each.
    fn prefilled(&mut self, index: usize, progress: &PrefillProgress) -> Vec<ResponseEvent> {
        let mut events = if self.has_begun { vec![self.in_progress()] } else { self.begin(index) };
        events.iter_mut().last().into_iter().for_each(|last| last.data[PROMPT_PROGRESS] = prompt_progress(progress));
        events
    }

    /// Nothing where the progress of the prompt has begun the response.
    fn begin(&mut self, _: usize) -> Vec<ResponseEvent> {
        if std::mem::replace(&mut self.has_begun, true) {
            return vec![];
        }
        let data = json!({"response": self.response("in_progress", vec![])});
        vec![self.event("response.created", data), self.in_progress()]
    }

    fn parts(
        &mut self,
        _: usize,
        parts: &[MessagePart],
        message: &AnswerMessage,
        _: &[SampledToken],
    ) -> Vec<ResponseEvent> {
        let each = parts.iter().flat_map(|part| {
            let changes = self.blocks.push(part);
            self.events(changes, &message.calls, "completed")
        });
        each.collect()
    }

    fn end(&mut self, _: usize, answer: &Answer) -> Vec<ResponseEvent> {
        let Answer { message, summary, .. } = answer;
        let closed = self.blocks.close().into_iter().collect();
        let status = status(summary.finish);
        let mut events = self.events(closed, &message.calls, status);
        let name = if status == "completed" { "response.completed" } else { "response.incomplete" };
        let response = self.ended(&message.calls, summary);
        events.push(self.event(name, json!({"response": response})));
        events
    }

    fn failed(&self, error: &ApiError) -> ResponseEvent {
        let code = error.code.unwrap_or("server_error");
        if !self.has_begun {
            let data = json!({
                "code": code, "message": error.message, "param": error.param, "sequence_number": self.sequence,
            });
            return ResponseEvent::typed("error", data);
        }
        let mut response = self.response("failed", vec![]);
        response["error"] = json!({"code": code, "message": error.message});
        let data = json!({"response": response, "sequence_number": self.sequence});
        ResponseEvent::typed("response.failed", data)
    }
}

/// The content part of a block; calls have none.
fn part(block: &AnswerBlock) -> Option<Value> {
    match block.kind {
        BlockKind::Reasoning => Some(json!({"type": "reasoning_text", "text": block.text})),
        BlockKind::Text => Some(json!({"type": "output_text", "text": block.text, "annotations": [], "logprobs": []})),
        BlockKind::Call(_) => None,
    }
}

fn status(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "completed",
        FinishReason::Length | FinishReason::Context => "incomplete",
    }
}

/// How many tokens the reasoning has is not known.
fn usage(summary: &GenerationSummary) -> Value {
    json!({
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": cached_details(summary.cached_tokens, [summary]),
        "output_tokens": summary.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": summary.prompt_tokens + summary.generated_tokens,
    })
}
