//! Responses to generation requests: one JSON object, or a stream of server-sent events.

mod openai;
mod sse;

use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

use crate::error::{ApiError, Json};
use crate::job::{GenerationEvent, GenerationSummary, TextDelta};

pub use openai::{Endpoint, ResponseFormat};
pub use sse::SseStream;

/// An answer that is complete.
pub struct Answer {
    /// All of its text.
    pub all: TextDelta,
    /// Its counts and times.
    pub summary: GenerationSummary,
}

/// Collects the events of all answers to a request into one response. All are read at the same time, since the
/// generation of an answer waits while its events are not read.
pub async fn complete_response(events: Vec<Receiver<GenerationEvent>>, format: ResponseFormat) -> Response {
    let mut collecting: JoinSet<_> =
        events.into_iter().enumerate().map(|(i, events)| async move { (i, collect(events).await) }).collect();
    let mut answers = Vec::new();
    while let Some(collected) = collecting.join_next().await {
        match collected {
            Ok((i, Ok(answer))) => answers.push((i, answer)),
            Ok((_, Err(error))) => return error.into_response(),
            Err(_) => return interrupted().into_response(),
        }
    }
    answers.sort_by_key(|(i, _)| *i);
    let answers: Vec<Answer> = answers.into_iter().map(|(_, answer)| answer).collect();
    Json(format.complete(&answers)).into_response()
}

async fn collect(mut events: Receiver<GenerationEvent>) -> Result<Answer, ApiError> {
    let mut all = TextDelta::default();
    loop {
        match events.recv().await {
            Some(GenerationEvent::Queued(_)) => {}
            Some(GenerationEvent::Delta(delta)) => {
                all.text.push_str(&delta.text);
                all.tokens.extend(delta.tokens);
            }
            Some(GenerationEvent::Done(summary)) => return Ok(Answer { all, summary }),
            Some(GenerationEvent::Failed(error)) => return Err(error),
            None => return Err(interrupted()),
        }
    }
}

/// The decode thread dropped the request without a final event.
fn interrupted() -> ApiError {
    ApiError::engine_failed("The engine stopped before the response was complete.")
}
