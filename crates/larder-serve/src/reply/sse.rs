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
use crate::job::{GenerationEvent, GenerationSummary};

/// Interval of keep-alive comments: proxies close connections that are silent for long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The events of all answers to a request as bytes for the client.
pub struct SseStream {
    answers: Vec<StreamedAnswer>,
    format: ResponseFormat,
    ready: VecDeque<Bytes>,
    ended: bool,
    keep_alive: Pin<Box<Sleep>>,
}

struct StreamedAnswer {
    events: Receiver<GenerationEvent>,
    begun: bool,
    summary: Option<GenerationSummary>,
}

impl SseStream {
    /// A stream of the `events` of each answer, formatted by `format`.
    pub fn new(events: Vec<Receiver<GenerationEvent>>, format: ResponseFormat) -> Self {
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        let answer = |events| StreamedAnswer { events, begun: false, summary: None };
        let answers = events.into_iter().map(answer).collect();
        SseStream { answers, format, ready: VecDeque::new(), ended: false, keep_alive }
    }

    /// Takes what has happened to any answer; false if nothing has.
    fn poll_answers(&mut self, context: &mut Context<'_>) -> bool {
        for index in 0..self.answers.len() {
            if self.answers[index].summary.is_none()
                && let Poll::Ready(event) = self.answers[index].events.poll_recv(context)
            {
                self.take(index, event);
                return true;
            }
        }
        false
    }

    fn take(&mut self, index: usize, event: Option<GenerationEvent>) {
        match event {
            Some(GenerationEvent::Queued(before)) => self.comment(&format!("queued, position {before}")),
            Some(GenerationEvent::Delta(delta)) => {
                self.begin(index);
                let delta = self.format.delta(index, &delta);
                self.data(&delta);
            }
            Some(GenerationEvent::Done(summary)) => {
                self.begin(index);
                let last = self.format.last(index, &summary);
                self.data(&last);
                self.answers[index].summary = Some(summary);
                self.end_if_complete();
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

    fn begin(&mut self, index: usize) {
        if !std::mem::replace(&mut self.answers[index].begun, true)
            && let Some(first) = self.format.first(index)
        {
            self.data(&first);
        }
    }

    fn end_if_complete(&mut self) {
        let summaries: Option<Vec<GenerationSummary>> = self.answers.iter().map(|answer| answer.summary).collect();
        if let Some(summaries) = summaries {
            if let Some(usage) = self.format.usage(&summaries) {
                self.data(&usage);
            }
            self.end();
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
            if self.poll_answers(context) {
                continue;
            }
            match self.keep_alive.as_mut().poll(context) {
                Poll::Ready(()) => self.comment("still working"),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
