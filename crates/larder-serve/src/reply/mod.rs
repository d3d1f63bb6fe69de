//! What goes back: an answer in one piece, or as a stream of events.

mod openai;
mod sse;

use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc::Receiver;

use crate::error::{ApiError, Json};
use crate::job::{GenerationEvent, TextDelta};

pub use openai::{Endpoint, ResponseFormat};
pub use sse::SseStream;

/// Waits for the whole answer.
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

/// Whoever wrote is gone.
fn interrupted() -> ApiError {
    ApiError::engine_failed("The answer was broken off.")
}
