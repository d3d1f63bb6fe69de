//! Responses in OpenAI's format, whole or as chunks of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use larder_engine::FinishReason;
use serde_json::{Map, Value, json};

use super::{
    Answer, AnswerMessage, CONTEXT_USE, Framing, MessagePart, PROMPT_PROGRESS, ResponseEvent, ResponseFormat, ToolCall,
    cached_details, prompt_progress, response_id, timings,
};
use crate::queue::job::{GenerationSummary, PrefillProgress, SampledToken, TokenLogprob};
use crate::request::GenerationParams;

/// The endpoint that was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Builds the response objects of one request.
pub struct OpenAiFormat {
    kind: Endpoint,
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    /// Answers to each prompt.
    choices: usize,
    /// Characters of each answer so far, for `text_offset`.
    offsets: Vec<usize>,
}

impl OpenAiFormat {
    /// The format of the response to request `number`.
    pub fn new(kind: Endpoint, number: u64, model: &str, params: &GenerationParams) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if kind == Endpoint::Chat { "chatcmpl-" } else { "cmpl-" };
        OpenAiFormat {
            kind,
            id: response_id(prefix, number),
            created: now.as_secs(),
            model: model.to_owned(),
            logprobs: params.logprobs.is_some(),
            include_usage: params.include_usage,
            choices: params.choices,
            offsets: Vec::new(),
        }
    }

    fn choice(&mut self, index: usize, answer: &Answer) -> Value {
        let finish = finish(answer);
        let logprobs = self.logprobs(index, &answer.tokens);
        match self.kind {
            Endpoint::Chat => json!({
                "index": index,
                "message": message(&answer.message),
                "logprobs": logprobs,
                "finish_reason": finish,
            }),
            Endpoint::Completion => {
                json!({"index": index, "text": answer.message.content, "logprobs": logprobs, "finish_reason": finish})
            }
        }
    }

    fn chunk_name(&self) -> &'static str {
        if self.kind == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn chunk(&self, index: usize, content: Value, logprobs: Value, finish: Value) -> ResponseEvent {
        let mut choice = Map::from_iter([("index".to_owned(), json!(index))]);
        choice.extend(content.as_object().cloned().unwrap_or_default());
        choice.insert("logprobs".into(), logprobs);
        choice.insert("finish_reason".into(), finish);
        let mut chunk = self.object(self.chunk_name(), json!([choice]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        ResponseEvent::unnamed(chunk)
    }

    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("larder-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }

    fn logprobs(&mut self, index: usize, tokens: &[SampledToken]) -> Value {
        match (self.logprobs, self.kind) {
            (false, _) => Value::Null,
            (true, Endpoint::Chat) => {
                json!({"content": tokens.iter().map(chat_token).collect::<Vec<_>>(), "refusal": null})
            }
            (true, Endpoint::Completion) => self.columns(index, tokens),
        }
    }

    fn columns(&mut self, index: usize, tokens: &[SampledToken]) -> Value {
        self.offsets.resize(self.offsets.len().max(index + 1), 0);
        let mut offsets = Vec::new();
        for token in tokens {
            offsets.push(self.offsets[index]);
            self.offsets[index] += token.sampled.text.chars().count();
        }
        let top = |token: &SampledToken| -> Value {
            let pairs = token.top.iter().chain([&token.sampled]);
            let mut all = Map::new();
            // Of tokens with the same text the likeliest counts.
            for token in pairs {
                let known = all.get(&token.text).and_then(Value::as_f64);
                if known.is_none_or(|known| known < token.logprob) {
                    all.insert(token.text.clone(), token.logprob.into());
                }
            }
            if token.sampled.logprob.is_nan() { Value::Null } else { Value::Object(all) }
        };
        json!({
            "tokens": tokens.iter().map(|token| token.sampled.text.as_str()).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.sampled.logprob).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }
}

impl ResponseFormat for OpenAiFormat {
    fn complete(&mut self, answers: &[Answer]) -> Value {
        let mut choices: Vec<Value> = answers.iter().enumerate().map(|(i, answer)| self.choice(i, answer)).collect();
        if let [_, _, ..] = answers {
            choices
                .iter_mut()
                .zip(answers)
                .for_each(|(choice, answer)| choice[CONTEXT_USE] = answer.summary.context.json());
        }
        let object = if self.kind == Endpoint::Chat { "chat.completion" } else { "text_completion" };
        let mut response = self.object(object, choices.into());
        let summaries: Vec<GenerationSummary> = answers.iter().map(|answer| answer.summary).collect();
        response["usage"] = usage(&summaries, self.choices);
        if let [summary] = summaries[..] {
            response["timings"] = timings(&summary);
            response[CONTEXT_USE] = summary.context.json();
        }
        response
    }

    fn framing(&self) -> Framing {
        Framing::ServerSentEvents { done: true }
    }

    /// A chunk without text.
    fn prefilled(&mut self, index: usize, progress: &PrefillProgress) -> Vec<ResponseEvent> {
        let nothing = match self.kind {
            Endpoint::Chat => json!({"delta": {"role": "assistant", "content": null}}),
            Endpoint::Completion => json!({"text": ""}),
        };
        let mut chunk = self.chunk(index, nothing, Value::Null, Value::Null);
        chunk.data[PROMPT_PROGRESS] = prompt_progress(progress);
        vec![chunk]
    }

    /// The chunk that names the role.
    fn begin(&mut self, index: usize) -> Vec<ResponseEvent> {
        let delta = json!({"delta": {"role": "assistant", "content": "", "refusal": null}});
        match self.kind {
            Endpoint::Chat => vec![self.chunk(index, delta, Value::Null, Value::Null)],
            Endpoint::Completion => vec![],
        }
    }

    fn parts(
        &mut self,
        index: usize,
        parts: &[MessagePart],
        message: &AnswerMessage,
        tokens: &[SampledToken],
    ) -> Vec<ResponseEvent> {
        let mut logprobs = self.logprobs(index, tokens);
        let nothing = [MessagePart::Content(String::new())];
        let parts = if parts.is_empty() { &nothing[..] } else { parts };
        let chunk = |part: &MessagePart| {
            let content = match (self.kind, part) {
                (Endpoint::Chat, part) => json!({"delta": delta(part, message)}),
                (Endpoint::Completion, MessagePart::Content(text)) => json!({"text": text}),
                (Endpoint::Completion, _) => json!({"text": ""}),
            };
            // The log-probabilities go with the first.
            self.chunk(index, content, logprobs.take(), Value::Null)
        };
        parts.iter().map(chunk).collect()
    }

    /// The chunk with the finish reason.
    fn end(&mut self, index: usize, answer: &Answer) -> Vec<ResponseEvent> {
        let nothing = if self.kind == Endpoint::Chat { json!({"delta": {}}) } else { json!({"text": ""}) };
        let mut last = self.chunk(index, nothing, Value::Null, finish(answer).into());
        last.data["timings"] = timings(&answer.summary);
        last.data[CONTEXT_USE] = answer.summary.context.json();
        vec![last]
    }

    /// The chunk with the usage, if it was requested.
    fn end_all(&mut self, summaries: &[GenerationSummary]) -> Vec<ResponseEvent> {
        let mut object = self.object(self.chunk_name(), json!([]));
        object["usage"] = usage(summaries, self.choices);
        if self.include_usage { vec![ResponseEvent::unnamed(object)] } else { vec![] }
    }
}

/// The message of a chat's answer; a call without text has no content.
fn message(AnswerMessage { reasoning, content, calls }: &AnswerMessage) -> Value {
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.as_str().into();
    }
    if !calls.is_empty() {
        if content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.iter().map(|call| tool_call(call, &call.arguments)).collect();
    }
    message
}

fn tool_call(ToolCall { id, name, .. }: &ToolCall, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// A part as a chat's delta.
fn delta(part: &MessagePart, message: &AnswerMessage) -> Value {
    match part {
        MessagePart::Reasoning(text) => json!({"reasoning_content": text}),
        MessagePart::Content(text) => json!({"content": text}),
        MessagePart::Call(index) => {
            let mut call = tool_call(&message.calls[*index], "");
            call["index"] = json!(index);
            json!({"tool_calls": [call]})
        }
        MessagePart::Arguments(index, text) => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        }
    }
}

fn chat_token(token: &SampledToken) -> Value {
    let mut value = logprob_object(&token.sampled);
    value["top_logprobs"] = token.top.iter().map(logprob_object).collect();
    value
}

fn logprob_object(token: &TokenLogprob) -> Value {
    // A replacement character stands for a part of a character, whose bytes are not known here.
    let bytes = (!token.text.contains('\u{fffd}')).then_some(token.text.as_bytes());
    json!({"token": token.text, "logprob": token.logprob, "bytes": bytes})
}

fn finish(answer: &Answer) -> &'static str {
    match answer.summary.finish {
        FinishReason::EndOfText | FinishReason::StopString if !answer.message.calls.is_empty() => "tool_calls",
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "stop",
        FinishReason::Length | FinishReason::Context => "length",
    }
}

/// The counts of all answers; a prompt counts once, however many answers it has.
fn usage(summaries: &[GenerationSummary], choices: usize) -> Value {
    let sum =
        |of: fn(&GenerationSummary) -> usize, every: usize| summaries.iter().step_by(every).map(of).sum::<usize>();
    let prompt = sum(|summary| summary.prompt_tokens, choices);
    let generated = sum(|summary| summary.generated_tokens, 1);
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": cached_details(sum(|summary| summary.cached_tokens, choices), summaries),
    })
}
