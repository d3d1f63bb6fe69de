//! A streamed answer of another server, passed on as it comes. If it breaks off, its last part is an error.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use bytes::Bytes;
use futures_core::Stream;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout_at;

use super::UpstreamAway;
use crate::error::ApiError;
use crate::error_form::ErrorForm;

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
