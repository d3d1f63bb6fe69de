//! Streams of server-sent events, and the route of the engine's events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::broadcast;

use crate::error::{ApiError, Result};
use crate::state::Shared;

/// Open event streams at a time.
const LISTENERS_MAX: usize = 32;

/// A response whose body is a stream of events.
pub fn event_stream(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Some proxies otherwise buffer the whole response.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

/// The events of all engines.
pub async fn events(State(server): State<Shared>) -> Result<Response> {
    if server.live.listeners() >= LISTENERS_MAX {
        return Err(ApiError::too_many_requests(LISTENERS_MAX, "event streams are open", 5));
    }
    let listener = server.live.subscribe();
    Ok(event_stream(Body::from_stream(EventStream { waiting: wait(listener) })))
}

type Waiting = Pin<Box<dyn Future<Output = (Option<Arc<str>>, broadcast::Receiver<Arc<str>>)> + Send>>;

/// Server-sent events of the engine; a client that lags misses some.
struct EventStream {
    waiting: Waiting,
}

fn wait(mut listener: broadcast::Receiver<Arc<str>>) -> Waiting {
    Box::pin(async move {
        loop {
            match listener.recv().await {
                Ok(event) => return (Some(event), listener),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return (None, listener),
            }
        }
    })
}

impl futures_core::Stream for EventStream {
    type Item = std::result::Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Poll::Ready((event, listener)) = self.waiting.as_mut().poll(context) else { return Poll::Pending };
        self.waiting = wait(listener);
        Poll::Ready(event.map(|event| Ok(format!("data: {event}\n\n").into())))
    }
}
