//! Responses in OpenAI's format, whole or as chunks of a stream.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_engine::FinishReason;
use serde_json::{Map, Value, json};

use crate::job::{GenerationSummary, SampledToken, TextDelta, TokenLogprob};

/// The endpoint that was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Builds the response objects of one request.
pub struct ResponseFormat {
    kind: Endpoint,
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    /// Characters so far, for `text_offset`.
    offset: usize,
}

impl ResponseFormat {
    /// The format of the response to request `number`.
    pub fn new(kind: Endpoint, number: u64, model: &str, logprobs: bool, include_usage: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if kind == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:012x}{number:08x}", now.as_micros() & 0xffff_ffff_ffff);
        ResponseFormat { kind, id, created: now.as_secs(), model: model.to_owned(), logprobs, include_usage, offset: 0 }
    }

    /// The response that is not streamed.
    pub fn complete(mut self, all: &TextDelta, summary: &GenerationSummary) -> Value {
        let finish = finish(summary.finish);
        let logprobs = self.logprobs(all);
        let choice = match self.kind {
            Endpoint::Chat => json!({
                "index": 0,
                "message": {"role": "assistant", "content": all.text, "refusal": null},
                "logprobs": logprobs,
                "finish_reason": finish,
            }),
            Endpoint::Completion => {
                json!({"index": 0, "text": all.text, "logprobs": logprobs, "finish_reason": finish})
            }
        };
        let object = if self.kind == Endpoint::Chat { "chat.completion" } else { "text_completion" };
        let mut response = self.object(object, json!([choice]));
        response["usage"] = usage(summary);
        response["timings"] = timings(summary);
        response
    }

    /// The chunk before the first text, which names the role.
    pub fn first(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        (self.kind == Endpoint::Chat).then(|| self.chunk(json!({"delta": delta}), Value::Null, Value::Null))
    }

    /// A piece of a stream.
    pub fn delta(&mut self, delta: &TextDelta) -> Value {
        let logprobs = self.logprobs(delta);
        match self.kind {
            Endpoint::Chat => self.chunk(json!({"delta": {"content": delta.text}}), logprobs, Value::Null),
            Endpoint::Completion => self.chunk(json!({"text": delta.text}), logprobs, Value::Null),
        }
    }

    /// The chunks that end a stream: the finish reason, and the usage if it was requested.
    pub fn last(&self, summary: &GenerationSummary) -> Vec<Value> {
        let nothing = if self.kind == Endpoint::Chat { json!({"delta": {}}) } else { json!({"text": ""}) };
        let mut last = self.chunk(nothing, Value::Null, finish(summary.finish).into());
        last["timings"] = timings(summary);
        let mut all = vec![last];
        if self.include_usage {
            let mut object = self.object(self.chunk_name(), json!([]));
            object["usage"] = usage(summary);
            all.push(object);
        }
        all
    }

    fn chunk_name(&self) -> &'static str {
        if self.kind == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn chunk(&self, content: Value, logprobs: Value, finish: Value) -> Value {
        let mut choice = Map::from_iter([("index".to_owned(), json!(0))]);
        choice.extend(content.as_object().cloned().unwrap_or_default());
        choice.insert("logprobs".into(), logprobs);
        choice.insert("finish_reason".into(), finish);
        let mut chunk = self.object(self.chunk_name(), json!([choice]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
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

    fn logprobs(&mut self, delta: &TextDelta) -> Value {
        match (self.logprobs, self.kind) {
            (false, _) => Value::Null,
            (true, Endpoint::Chat) => {
                json!({"content": delta.tokens.iter().map(chat_token).collect::<Vec<_>>(), "refusal": null})
            }
            (true, Endpoint::Completion) => self.columns(&delta.tokens),
        }
    }

    fn columns(&mut self, tokens: &[SampledToken]) -> Value {
        let mut offsets = Vec::new();
        for token in tokens {
            offsets.push(self.offset);
            self.offset += token.sampled.text.chars().count();
        }
        let top = |token: &SampledToken| -> Map<String, Value> {
            let pairs = token.top.iter().chain([&token.sampled]);
            pairs.map(|token| (token.text.clone(), token.logprob.into())).collect()
        };
        json!({
            "tokens": tokens.iter().map(|token| token.sampled.text.as_str()).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.sampled.logprob).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
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

fn finish(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopString | FinishReason::Cancelled => "stop",
        FinishReason::Length | FinishReason::Context => "length",
    }
}

fn usage(summary: &GenerationSummary) -> Value {
    json!({
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.generated_tokens,
        "total_tokens": summary.prompt_tokens + summary.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": summary.cached_tokens},
    })
}

/// Timings under the names of llama.cpp's server.
fn timings(summary: &GenerationSummary) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let read = summary.prompt_tokens - summary.cached_tokens.min(summary.prompt_tokens);
    let after_first = summary.generated_tokens.saturating_sub(1);
    json!({
        "queued_ms": ms(summary.queued),
        "cache_n": summary.cached_tokens,
        "prompt_n": read,
        "prompt_ms": ms(summary.prefill),
        "prompt_per_second": rate(read, summary.prefill),
        "predicted_n": summary.generated_tokens,
        "predicted_ms": ms(summary.decode),
        "predicted_per_second": rate(after_first, summary.decode),
    })
}
