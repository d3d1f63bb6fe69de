//! A response as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, Sleep, sleep};

use super::openai::ResponseFormat;
use crate::job::GenerationEvent;

/// Interval of keep-alive comments: proxies close connections that are silent for long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of a generation as bytes for the client.
pub struct SseStream {
    events: Receiver<GenerationEvent>,
    format: ResponseFormat,
    ready: VecDeque<Bytes>,
    begun: bool,
    ended: bool,
    keep_alive: Pin<Box<Sleep>>,
}

impl SseStream {
    /// A stream of `events`, formatted by `format`.
    pub fn new(events: Receiver<GenerationEvent>, format: ResponseFormat) -> Self {
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        SseStream { events, format, ready: VecDeque::new(), begun: false, ended: false, keep_alive }
    }

    fn take(&mut self, event: Option<GenerationEvent>) {
        match event {
            Some(GenerationEvent::Queued(before)) => self.comment(&format!("queued, position {before}")),
            Some(GenerationEvent::Delta(delta)) => {
                self.begin();
                let delta = self.format.delta(&delta);
                self.data(&delta);
            }
            Some(GenerationEvent::Done(summary)) => {
                self.begin();
                for chunk in self.format.last(&summary) {
                    self.data(&chunk);
                }
                self.end();
            }
            Some(GenerationEvent::Failed(error)) => {
                self.data(&error.json());
                self.end();
            }
            None => {
                self.data(&super::interrupted().json());
                self.end();
            }
        }
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true)
            && let Some(first) = self.format.first()
        {
            self.data(&first);
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }

    fn data(&mut self, value: &Value) {
        self.ready.push_back(format!("data: {value}\n\n").into());
    }

    fn comment(&mut self, text: &str) {
        self.ready.push_back(format!(": {text}\n\n").into());
    }
}

impl futures_core::Stream for SseStream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                self.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            if let Poll::Ready(event) = self.events.poll_recv(context) {
                self.take(event);
                continue;
            }
            match self.keep_alive.as_mut().poll(context) {
                Poll::Ready(()) => self.comment("still working"),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
