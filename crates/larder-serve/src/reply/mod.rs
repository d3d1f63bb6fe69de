//! What goes back: an answer in one piece, or as a stream of events.

mod form;
mod stream;

use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc::Receiver;

use crate::error::{ApiError, Json};
use crate::job::{Event, Piece};

pub use form::{Form, Kind};
pub use stream::Stream;

/// Waits for the whole answer.
pub async fn whole(mut events: Receiver<Event>, form: Form) -> Response {
    let mut all = Piece::default();
    loop {
        match events.recv().await {
            Some(Event::Waiting(_)) => {}
            Some(Event::Piece(piece)) => {
                all.text.push_str(&piece.text);
                all.tokens.extend(piece.tokens);
            }
            Some(Event::Done(summary)) => return Json(form.whole(&all, &summary)).into_response(),
            Some(Event::Failed(error)) => return error.into_response(),
            None => return broken_off().into_response(),
        }
    }
}

/// Whoever wrote is gone.
fn broken_off() -> ApiError {
    ApiError::failed("The answer was broken off.")
}
