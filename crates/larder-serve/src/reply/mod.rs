//! Responses to generation requests: one JSON object, or a stream of server-sent events.

mod openai;
mod sse;

use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc::Receiver;

use crate::error::{ApiError, Json};
use crate::job::{GenerationEvent, TextDelta};

pub use openai::{Endpoint, ResponseFormat};
pub use sse::SseStream;

/// Collects all events of a generation into one response.
pub async fn complete_response(mut events: Receiver<GenerationEvent>, format: ResponseFormat) -> Response {
    let mut all = TextDelta::default();
    loop {
        match events.recv().await {
            Some(GenerationEvent::Queued(_)) => {}
            Some(GenerationEvent::Delta(delta)) => {
                all.text.push_str(&delta.text);
                all.tokens.extend(delta.tokens);
            }
            Some(GenerationEvent::Done(summary)) => return Json(format.complete(&all, &summary)).into_response(),
            Some(GenerationEvent::Failed(error)) => return error.into_response(),
            None => return interrupted().into_response(),
        }
    }
}

/// The decode thread dropped the request without a final event.
fn interrupted() -> ApiError {
    ApiError::engine_failed("The engine stopped before the response was complete.")
}
