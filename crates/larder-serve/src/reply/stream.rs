//! A response as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, Sleep, sleep};

use super::{Answer, Framing, MessageBuilder, PendingAnswer, ResponseEvent, ResponseFormat};
use crate::queue::job::{GenerationEvent, GenerationSummary, SampledToken};

/// Interval of keep-alive comments: proxies close connections that are silent for long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Tokens after which a comment says again how full the context is.
const CONTEXT_PAUSE: usize = 16;

/// The events of all answers to a request as bytes for the client.
pub struct ResponseStream {
    answers: Vec<StreamedAnswer>,
    format: Box<dyn ResponseFormat>,
    ready: VecDeque<Bytes>,
    ended: bool,
    keep_alive: Pin<Box<Sleep>>,
}

struct StreamedAnswer {
    events: Receiver<GenerationEvent>,
    builder: MessageBuilder,
    /// Tokens of text that is held back.
    tokens: Vec<SampledToken>,
    begun: bool,
    /// Tokens in the context, as was said last.
    context_tokens: usize,
    summary: Option<GenerationSummary>,
}

impl ResponseStream {
    /// A stream of `answers` in `format`.
    pub fn new(answers: Vec<PendingAnswer>, format: Box<dyn ResponseFormat>) -> Self {
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        let answer = |PendingAnswer { events, parser }| StreamedAnswer {
            events,
            builder: MessageBuilder::new(parser),
            tokens: Vec::new(),
            begun: false,
            context_tokens: 0,
            summary: None,
        };
        let answers = answers.into_iter().map(answer).collect();
        ResponseStream { answers, format, ready: VecDeque::new(), ended: false, keep_alive }
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
            Some(GenerationEvent::Prefilled(progress)) => {
                let events = self.format.prefilled(index, &progress);
                self.send(events);
            }
            Some(GenerationEvent::Delta(delta)) => {
                self.begin(index);
                self.tell_context(index, delta.context_tokens);
                let answer = &mut self.answers[index];
                answer.tokens.extend(delta.tokens);
                let parts = answer.builder.push(delta.text);
                // Tokens wait for their text, unless that is empty.
                if !parts.is_empty() {
                    let tokens = std::mem::take(&mut answer.tokens);
                    let events = self.format.parts(index, &parts, &answer.builder.message, &tokens);
                    self.send(events);
                }
            }
            Some(GenerationEvent::Embedded(_)) => {}
            Some(GenerationEvent::Done(summary)) => self.finish(index, summary),
            Some(GenerationEvent::Failed(error)) => self.fail(&error),
            None => self.fail(&super::interrupted()),
        }
    }

    fn begin(&mut self, index: usize) {
        if !std::mem::replace(&mut self.answers[index].begun, true) {
            let events = self.format.begin(index);
            self.send(events);
        }
    }

    /// Says in a comment how full the context is, now and then; with several answers there are several.
    fn tell_context(&mut self, index: usize, tokens: usize) {
        let answer = &mut self.answers[index];
        if answer.context_tokens.abs_diff(tokens) >= CONTEXT_PAUSE {
            answer.context_tokens = tokens;
            if self.answers.len() == 1 {
                self.comment(&format!("context {tokens}"));
            }
        }
    }

    fn finish(&mut self, index: usize, summary: GenerationSummary) {
        self.begin(index);
        let answer = &mut self.answers[index];
        let parts = answer.builder.finish();
        let tokens = std::mem::take(&mut answer.tokens);
        if !parts.is_empty() || !tokens.is_empty() {
            let events = self.format.parts(index, &parts, &answer.builder.message, &tokens);
            self.send(events);
        }
        let answer = &mut self.answers[index];
        answer.summary = Some(summary);
        let message = std::mem::take(&mut answer.builder.message);
        let events = self.format.end(index, &Answer { message, tokens: vec![], summary });
        self.send(events);
        let summaries: Option<Vec<GenerationSummary>> = self.answers.iter().map(|answer| answer.summary).collect();
        if let Some(summaries) = summaries {
            let events = self.format.end_all(&summaries);
            self.send(events);
            self.end();
        }
    }

    fn fail(&mut self, error: &crate::error::ApiError) {
        tracing::info!(%error, "stream ended");
        let event = self.format.failed(error);
        self.send(vec![event]);
        self.end();
    }

    fn end(&mut self) {
        self.ended = true;
        if self.format.framing() == (Framing::ServerSentEvents { done: true }) {
            self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }

    fn send(&mut self, events: Vec<ResponseEvent>) {
        let framing = self.format.framing();
        let frame = |ResponseEvent { name, data }| match (framing, name) {
            (Framing::JsonLines, _) => format!("{data}\n"),
            (_, Some(name)) => format!("event: {name}\ndata: {data}\n\n"),
            (_, None) => format!("data: {data}\n\n"),
        };
        self.ready.extend(events.into_iter().map(|event| Bytes::from(frame(event))));
    }

    /// Server-sent events have comments; lines of JSON have none.
    fn comment(&mut self, text: &str) {
        if self.format.framing() != Framing::JsonLines {
            self.ready.push_back(format!(": {text}\n\n").into());
        }
    }
}

impl futures_core::Stream for ResponseStream {
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
                Poll::Ready(()) => {
                    self.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
                    self.comment("still working");
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
