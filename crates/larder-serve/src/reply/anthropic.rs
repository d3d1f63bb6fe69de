//! Responses in the format of Anthropic's Messages.

use larder_engine::FinishReason;
use serde_json::{Value, json};

use super::blocks::{AnswerBlock, AnswerBlocks, BlockChange, BlockKind};
use super::{
    Answer, AnswerMessage, CONTEXT_USE, MessagePart, ResponseEvent, ResponseFormat, ToolCall, parsed_arguments,
    response_id,
};
use crate::error::ApiError;
use crate::error::form::ErrorForm;
use crate::queue::job::{GenerationSummary, SampledToken};

/// Builds the response to one request.
pub struct AnthropicFormat {
    id: String,
    model: String,
    prompt_tokens: usize,
    /// The request's stop strings.
    stops: Vec<String>,
    blocks: AnswerBlocks,
}

impl AnthropicFormat {
    /// The format of the response to request `number`, whose prompt has `prompt_tokens`.
    pub fn new(number: u64, model: &str, prompt_tokens: usize, stops: Vec<String>) -> Self {
        AnthropicFormat {
            id: response_id("msg_", number),
            model: model.to_owned(),
            prompt_tokens,
            stops,
            blocks: AnswerBlocks::default(),
        }
    }

    fn message(&self, content: Vec<Value>, usage: Value) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage,
        })
    }

    fn events(&self, changes: Vec<BlockChange>, message: &AnswerMessage) -> Vec<ResponseEvent> {
        let event = |change| match change {
            BlockChange::Opened(index) => {
                let empty = AnswerBlock { text: String::new(), ..self.blocks.list[index].clone() };
                let block = content_block(&empty, &message.calls);
                ResponseEvent::typed("content_block_start", json!({"index": index, "content_block": block}))
            }
            BlockChange::Extended(index, text) => {
                let delta = match self.blocks.list[index].kind {
                    BlockKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                    BlockKind::Text => json!({"type": "text_delta", "text": text}),
                    BlockKind::Call(_) => json!({"type": "input_json_delta", "partial_json": text}),
                };
                ResponseEvent::typed("content_block_delta", json!({"index": index, "delta": delta}))
            }
            BlockChange::Closed(index) => ResponseEvent::typed("content_block_stop", json!({"index": index})),
        };
        changes.into_iter().map(event).collect()
    }

    /// Why the answer ended, and the stop string that ended it.
    fn stop(&self, answer: &Answer) -> (&'static str, Option<&String>) {
        let GenerationSummary { finish, stop_string, .. } = answer.summary;
        let stop = stop_string.and_then(|index| self.stops.get(index));
        match finish {
            FinishReason::Length | FinishReason::Context => ("max_tokens", None),
            _ if !answer.message.calls.is_empty() => ("tool_use", None),
            _ if stop.is_some() => ("stop_sequence", stop),
            _ => ("end_turn", None),
        }
    }
}

impl ResponseFormat for AnthropicFormat {
    fn complete(&mut self, answers: &[Answer]) -> Value {
        let [answer] = answers else { return Value::Null };
        let blocks = AnswerBlocks::of_message(&answer.message).list;
        let content = blocks.iter().map(|block| content_block(block, &answer.message.calls)).collect();
        let mut message = self.message(content, usage(&answer.summary));
        let (reason, stop) = self.stop(answer);
        message[CONTEXT_USE] = answer.summary.context.json();
        (message["stop_reason"], message["stop_sequence"]) = (json!(reason), json!(stop));
        message
    }

    /// How many tokens are cached is known at the end only.
    fn begin(&mut self, _: usize) -> Vec<ResponseEvent> {
        let usage = json!({
            "input_tokens": self.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        });
        let start = json!({"message": self.message(vec![], usage)});
        vec![ResponseEvent::typed("message_start", start), ResponseEvent::typed("ping", json!({}))]
    }

    fn parts(
        &mut self,
        _: usize,
        parts: &[MessagePart],
        message: &AnswerMessage,
        _: &[SampledToken],
    ) -> Vec<ResponseEvent> {
        let changes = parts.iter().flat_map(|part| self.blocks.push(part)).collect();
        self.events(changes, message)
    }

    fn end(&mut self, _: usize, answer: &Answer) -> Vec<ResponseEvent> {
        let closed = self.blocks.close().into_iter().collect();
        let mut events = self.events(closed, &answer.message);
        let (reason, stop) = self.stop(answer);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        let data = json!({"delta": delta, "usage": usage(&answer.summary), CONTEXT_USE: answer.summary.context.json()});
        events.push(ResponseEvent::typed("message_delta", data));
        events.push(ResponseEvent::typed("message_stop", json!({})));
        events
    }

    fn failed(&self, error: &ApiError) -> ResponseEvent {
        ResponseEvent::typed("error", ErrorForm::Anthropic.json(error))
    }
}

/// A block as the API writes it; arguments that were cut off become an empty input.
fn content_block(block: &AnswerBlock, calls: &[ToolCall]) -> Value {
    match block.kind {
        BlockKind::Reasoning => json!({"type": "thinking", "thinking": block.text, "signature": ""}),
        BlockKind::Text => json!({"type": "text", "text": block.text}),
        BlockKind::Call(index) => {
            let ToolCall { id, name, .. } = &calls[index];
            json!({"type": "tool_use", "id": id, "name": name, "input": parsed_arguments(&block.text)})
        }
    }
}

fn usage(summary: &GenerationSummary) -> Value {
    let mut usage = json!({
        "input_tokens": summary.prompt_tokens.saturating_sub(summary.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": summary.cached_tokens,
        "output_tokens": summary.generated_tokens,
    });
    if let Some(miss) = &summary.miss {
        usage["cache_miss_reason"] = miss.to_string().into();
    }
    usage
}
