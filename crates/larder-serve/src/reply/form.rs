//! Answers as OpenAI's server words them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder_engine::Finish;
use serde_json::{Map, Value, json};

use crate::job::{Likelihood, Piece, Summary, TokenLog};

/// What was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The next message of a chat.
    Chat,
    /// The continuation of a text.
    Completion,
}

/// What all parts of one answer have in common.
pub struct Form {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    include_usage: bool,
    /// Characters so far, where logprobs count them.
    offset: usize,
}

impl Form {
    /// The form of the answer to request `number`.
    pub fn new(kind: Kind, number: u64, model: &str, logprobs: bool, include_usage: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:012x}{number:08x}", now.as_micros() & 0xffff_ffff_ffff);
        Form { kind, id, created: now.as_secs(), model: model.to_owned(), logprobs, include_usage, offset: 0 }
    }

    /// The answer in one piece.
    pub fn whole(mut self, all: &Piece, summary: &Summary) -> Value {
        let finish = finish(summary.finish);
        let logprobs = self.logprobs(all);
        let choice = match self.kind {
            Kind::Chat => json!({
                "index": 0,
                "message": {"role": "assistant", "content": all.text, "refusal": null},
                "logprobs": logprobs,
                "finish_reason": finish,
            }),
            Kind::Completion => {
                json!({"index": 0, "text": all.text, "logprobs": logprobs, "finish_reason": finish})
            }
        };
        let object = if self.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut answer = self.object(object, json!([choice]));
        answer["usage"] = usage(summary);
        answer["timings"] = timings(summary);
        answer
    }

    /// What comes before the first text.
    pub fn first(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": "", "refusal": null});
        (self.kind == Kind::Chat).then(|| self.chunk(json!({"delta": delta}), Value::Null, Value::Null))
    }

    /// A piece of a stream.
    pub fn piece(&mut self, piece: &Piece) -> Value {
        let logprobs = self.logprobs(piece);
        match self.kind {
            Kind::Chat => self.chunk(json!({"delta": {"content": piece.text}}), logprobs, Value::Null),
            Kind::Completion => self.chunk(json!({"text": piece.text}), logprobs, Value::Null),
        }
    }

    /// What ends a stream: why, and the usage if it was asked for.
    pub fn last(&self, summary: &Summary) -> Vec<Value> {
        let nothing = if self.kind == Kind::Chat { json!({"delta": {}}) } else { json!({"text": ""}) };
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
        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
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

    fn logprobs(&mut self, piece: &Piece) -> Value {
        match (self.logprobs, self.kind) {
            (false, _) => Value::Null,
            (true, Kind::Chat) => {
                json!({"content": piece.tokens.iter().map(chat_token).collect::<Vec<_>>(), "refusal": null})
            }
            (true, Kind::Completion) => self.columns(&piece.tokens),
        }
    }

    fn columns(&mut self, tokens: &[TokenLog]) -> Value {
        let mut offsets = Vec::new();
        for token in tokens {
            offsets.push(self.offset);
            self.offset += token.drawn.text.chars().count();
        }
        let top = |token: &TokenLog| -> Map<String, Value> {
            let pairs = token.top.iter().chain([&token.drawn]);
            pairs.map(|likely| (likely.text.clone(), likely.logprob.into())).collect()
        };
        json!({
            "tokens": tokens.iter().map(|token| token.drawn.text.as_str()).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.drawn.logprob).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }
}

fn chat_token(token: &TokenLog) -> Value {
    let mut value = likelihood(&token.drawn);
    value["top_logprobs"] = token.top.iter().map(likelihood).collect();
    value
}

fn likelihood(likely: &Likelihood) -> Value {
    // A part of a character is no text, and what its bytes were is not known.
    let bytes = (!likely.text.contains('\u{fffd}')).then_some(likely.text.as_bytes());
    json!({"token": likely.text, "logprob": likely.logprob, "bytes": bytes})
}

fn finish(finish: Finish) -> &'static str {
    match finish {
        Finish::EndOfText | Finish::StopString | Finish::Cancelled => "stop",
        Finish::Length | Finish::Context => "length",
    }
}

fn usage(summary: &Summary) -> Value {
    json!({
        "prompt_tokens": summary.prompt,
        "completion_tokens": summary.written,
        "total_tokens": summary.prompt + summary.written,
        "prompt_tokens_details": {"cached_tokens": summary.remembered},
    })
}

/// By the names that llama.cpp's server uses.
fn timings(summary: &Summary) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let read = summary.prompt - summary.remembered.min(summary.prompt);
    let after_first = summary.written.saturating_sub(1);
    json!({
        "queued_ms": ms(summary.queued),
        "cache_n": summary.remembered,
        "prompt_n": read,
        "prompt_ms": ms(summary.reading),
        "prompt_per_second": rate(read, summary.reading),
        "predicted_n": summary.written,
        "predicted_ms": ms(summary.writing),
        "predicted_per_second": rate(after_first, summary.writing),
    })
}
