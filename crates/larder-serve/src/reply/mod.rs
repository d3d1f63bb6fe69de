//! Responses to generation requests: one JSON object, or a stream of events, in the format of an API.

mod anthropic;
mod blocks;
mod llama;
mod message;
mod ollama;
mod openai;
mod responses;
mod stream;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use larder_text::OutputParser;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

use crate::error::{ApiError, Json};
use crate::queue::job::{GenerationEvent, GenerationSummary, PrefillProgress, SampledToken};

pub use anthropic::AnthropicFormat;
pub use llama::LlamaFormat;
pub use message::{AnswerMessage, MessageBuilder, MessagePart, ToolCall};
pub use ollama::{OllamaEndpoint, OllamaFormat};
pub use openai::{Endpoint, OpenAiFormat};
pub use responses::ResponsesFormat;
pub use stream::ResponseStream;

/// The field of a response that says how full the context is and what was cut.
const CONTEXT_USE: &str = "context_use";
/// The field of an event that says how much of the prompt is computed, as llama.cpp's server calls it.
const PROMPT_PROGRESS: &str = "prompt_progress";

/// The format of the responses of an API.
pub trait ResponseFormat: Send {
    /// The response that is not streamed.
    fn complete(&mut self, answers: &[Answer]) -> Value;

    /// How events of a stream are written.
    fn framing(&self) -> Framing {
        Framing::ServerSentEvents { done: false }
    }

    /// Events about how much of the prompt of the answer `index` is computed, where the API has such events.
    fn prefilled(&mut self, index: usize, progress: &PrefillProgress) -> Vec<ResponseEvent> {
        let _ = (index, progress);
        vec![]
    }

    /// Events before the first part of the answer `index`.
    fn begin(&mut self, index: usize) -> Vec<ResponseEvent>;

    /// Events for new parts of an answer, whose message so far is `message`; `tokens` are those generated since the
    /// last call, if log-probabilities were requested.
    fn parts(
        &mut self,
        index: usize,
        parts: &[MessagePart],
        message: &AnswerMessage,
        tokens: &[SampledToken],
    ) -> Vec<ResponseEvent>;

    /// Events at the end of an answer.
    fn end(&mut self, index: usize, answer: &Answer) -> Vec<ResponseEvent>;

    /// Events behind all answers.
    fn end_all(&mut self, summaries: &[GenerationSummary]) -> Vec<ResponseEvent> {
        let _ = summaries;
        vec![]
    }

    /// The event that ends a stream with an error.
    fn failed(&self, error: &ApiError) -> ResponseEvent {
        ResponseEvent::unnamed(error.json())
    }

    /// The response to a request that fails before anything was streamed.
    fn error_response(&self, error: ApiError) -> Response {
        error.into_response()
    }
}

/// How events are written to a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framing {
    /// Server-sent events; `done` for `[DONE]` as the last.
    ServerSentEvents {
        /// Whether `[DONE]` ends the stream.
        done: bool,
    },
    /// A line of JSON for each event.
    JsonLines,
}

/// An event of a stream.
#[derive(Clone, PartialEq, Debug)]
pub struct ResponseEvent {
    /// The event's name, where the API has names.
    pub name: Option<&'static str>,
    /// Its data.
    pub data: Value,
}

impl ResponseEvent {
    /// An event without a name.
    pub fn unnamed(data: Value) -> Self {
        ResponseEvent { name: None, data }
    }

    /// An event with a name, which its data repeats as `type`.
    pub fn typed(name: &'static str, mut data: Value) -> Self {
        data["type"] = name.into();
        ResponseEvent { name: Some(name), data }
    }
}

/// An answer that is complete.
pub struct Answer {
    /// Its parts.
    pub message: AnswerMessage,
    /// Its tokens, if log-probabilities were requested.
    pub tokens: Vec<SampledToken>,
    /// Its counts and times.
    pub summary: GenerationSummary,
}

/// An answer on its way: events of its generation, and what separates its parts.
pub struct PendingAnswer {
    /// Where the events arrive.
    pub events: Receiver<GenerationEvent>,
    /// The parser of a chat's answer.
    pub parser: Option<Box<dyn OutputParser>>,
}

/// Collects the events of all answers to a request into one response. All are read at the same time, since the
/// generation of an answer waits while its events are not read.
pub async fn complete_response(answers: Vec<PendingAnswer>, mut format: Box<dyn ResponseFormat>) -> Response {
    let mut collecting: JoinSet<_> =
        answers.into_iter().enumerate().map(|(i, answer)| async move { (i, collect(answer).await) }).collect();
    let mut answers = Vec::new();
    while let Some(collected) = collecting.join_next().await {
        match collected {
            Ok((i, Ok(answer))) => answers.push((i, answer)),
            Ok((_, Err(error))) => return format.error_response(error),
            Err(_) => return format.error_response(interrupted()),
        }
    }
    answers.sort_by_key(|(i, _)| *i);
    let answers: Vec<Answer> = answers.into_iter().map(|(_, answer)| answer).collect();
    Json(format.complete(&answers)).into_response()
}

async fn collect(PendingAnswer { mut events, parser }: PendingAnswer) -> Result<Answer, ApiError> {
    let (mut builder, mut tokens) = (MessageBuilder::new(parser), Vec::new());
    loop {
        match events.recv().await {
            Some(GenerationEvent::Queued(_) | GenerationEvent::Prefilled(_) | GenerationEvent::Embedded(_)) => {}
            Some(GenerationEvent::Delta(delta)) => {
                builder.push(delta.text);
                tokens.extend(delta.tokens);
            }
            Some(GenerationEvent::Done(summary)) => {
                builder.finish();
                return Ok(Answer { message: builder.message, tokens, summary });
            }
            Some(GenerationEvent::Failed(error)) => return Err(error),
            None => return Err(interrupted()),
        }
    }
}

/// The id of the response to request `number`: unique also over restarts of the server.
fn response_id(prefix: &str, number: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{prefix}{:012x}{number:08x}", now.as_micros() & 0xffff_ffff_ffff)
}

/// The arguments of a call as an object, which is empty for those that were cut off.
fn parsed_arguments(text: &str) -> Value {
    serde_json::from_str(text).ok().filter(Value::is_object).unwrap_or_else(|| Value::Object(Map::new()))
}

/// How many tokens of a prompt the prefix cache had, and why not more, by the first of the answers that knows.
fn cached_details<'a>(tokens: usize, summaries: impl IntoIterator<Item = &'a GenerationSummary>) -> Value {
    let mut details = json!({"cached_tokens": tokens});
    if let Some(miss) = summaries.into_iter().find_map(|summary| summary.miss) {
        details["cache_miss_reason"] = miss.to_string().into();
    }
    details
}

/// Timings under the names of llama.cpp's server.
fn timings(summary: &GenerationSummary) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    let read = summary.prompt_tokens - summary.cached_tokens.min(summary.prompt_tokens);
    let after_first = summary.generated_tokens.saturating_sub(1);
    let mut timings = json!({
        "queued_ms": ms(summary.queued),
        "cache_n": summary.cached_tokens,
        "prompt_n": read,
        "prompt_ms": ms(summary.prefill),
        "prompt_per_second": rate(read, summary.prefill),
        "predicted_n": summary.generated_tokens,
        "predicted_ms": ms(summary.decode),
        "predicted_per_second": rate(after_first, summary.decode),
    });
    if let Some(miss) = &summary.miss {
        timings["cache_miss_reason"] = miss.to_string().into();
    }
    timings
}

/// The progress of a prompt under the names of llama.cpp's server.
fn prompt_progress(progress: &PrefillProgress) -> Value {
    let PrefillProgress { total, cached, processed, time } = progress;
    json!({"total": total, "cache": cached, "processed": processed, "time_ms": time.as_millis() as u64})
}

/// The decode thread dropped the request without a final event.
fn interrupted() -> ApiError {
    ApiError::engine_failed("The engine stopped before the response was complete.")
}

#[cfg(test)]
mod tests;
