//! Answers of another server: one that is streamed is passed on as it comes, and if it breaks off, its last part is an
//! error; any other is passed on when it is complete.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use futures_core::Stream;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;

use super::UpstreamAway;
use crate::error::ApiError;
use crate::error::form::ErrorForm;

/// A complete answer, which keeps its room until the client has it.
struct CompleteAnswer {
    bytes: BytesMut,
    _room: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for CompleteAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads an answer to its end. Each byte takes a permit of `room`; `None` if there are too few.
pub async fn read_complete(mut incoming: Incoming, room: &Arc<Semaphore>) -> Result<Option<Body>, UpstreamAway> {
    let (mut bytes, mut taken) = (BytesMut::new(), None::<OwnedSemaphorePermit>);
    while let Some(frame) = incoming.frame().await {
        let frame = frame.map_err(|error| UpstreamAway::new("its answer broke off", error))?;
        let Ok(data) = frame.into_data() else { continue };
        let Ok(more) = room.clone().try_acquire_many_owned(data.len() as u32) else { return Ok(None) };
        bytes.extend_from_slice(&data);
        match &mut taken {
            Some(taken) => taken.merge(more),
            None => taken = Some(more),
        }
    }
    let complete = taken.map(|_room| Bytes::from_owner(CompleteAnswer { bytes, _room }));
    Ok(Some(Body::from(complete.unwrap_or_default())))
}

/// The parts of an answer.
pub struct StreamedBody {
    first: Option<Bytes>,
    rest: Option<Incoming>,
    form: ErrorForm,
}

impl StreamedBody {
    /// The answer, once its first part has come.
    pub async fn after_first(mut rest: Incoming, form: ErrorForm, deadline: Instant) -> Result<Body, UpstreamAway> {
        let first = timeout_at(deadline.into(), rest.frame()).await;
        let first = first.map_err(|_| UpstreamAway("it did not answer within the time limit".into()))?;
        let first = first.transpose().map_err(|error| UpstreamAway::new("its answer broke off", error))?;
        let first = first.ok_or_else(|| UpstreamAway("its answer is empty".into()))?.into_data().ok();
        Ok(Body::from_stream(StreamedBody { first, rest: Some(rest), form }))
    }

    /// The event of an error, in the form of the API.
    fn broken(&self, error: &hyper::Error) -> Bytes {
        let message = format!("The upstream server's answer broke off: {error}.");
        let error = ApiError::new(StatusCode::BAD_GATEWAY, "upstream_failed", message);
        let json = self.form.json(&error);
        match self.form {
            ErrorForm::Ollama => format!("\n{json}\n"),
            ErrorForm::Anthropic => format!("\n\nevent: error\ndata: {json}\n\n"),
            ErrorForm::OpenAi => format!("\n\ndata: {json}\n\n"),
        }
        .into()
    }
}

impl Stream for StreamedBody {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        loop {
            let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
            let Poll::Ready(frame) = Pin::new(rest).poll_frame(context) else { return Poll::Pending };
            match frame {
                None => return Poll::Ready(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Some(Err(error)) => {
                    self.rest = None;
                    return Poll::Ready(Some(Ok(self.broken(&error))));
                }
            }
        }
    }
}
