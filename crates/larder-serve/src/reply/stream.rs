//! An answer as server-sent events.

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

use super::form::Form;
use crate::job::Event;

/// How long a stream may be silent: whoever is between gives up on a connection on which nothing happens.
const SILENCE: Duration = Duration::from_secs(15);

/// The events of an answer, as the bytes that a client gets.
pub struct Stream {
    events: Receiver<Event>,
    form: Form,
    ready: VecDeque<Bytes>,
    begun: bool,
    over: bool,
    alive: Pin<Box<Sleep>>,
}

impl Stream {
    /// The stream of what `events` tell.
    pub fn new(events: Receiver<Event>, form: Form) -> Self {
        let alive = Box::pin(sleep(SILENCE));
        Stream { events, form, ready: VecDeque::new(), begun: false, over: false, alive }
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Waiting(before)) => self.comment(&format!("waiting, position {before} in the queue")),
            Some(Event::Piece(piece)) => {
                self.begin();
                let piece = self.form.piece(&piece);
                self.data(&piece);
            }
            Some(Event::Done(summary)) => {
                self.begin();
                for chunk in self.form.last(&summary) {
                    self.data(&chunk);
                }
                self.end();
            }
            Some(Event::Failed(error)) => {
                self.data(&error.json());
                self.end();
            }
            None => {
                self.data(&super::broken_off().json());
                self.end();
            }
        }
    }

    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true)
            && let Some(first) = self.form.first()
        {
            self.data(&first);
        }
    }

    fn end(&mut self) {
        self.over = true;
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }

    fn data(&mut self, value: &Value) {
        self.ready.push_back(format!("data: {value}\n\n").into());
    }

    fn comment(&mut self, text: &str) {
        self.ready.push_back(format!(": {text}\n\n").into());
    }
}

impl futures_core::Stream for Stream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                self.alive.as_mut().reset(Instant::now() + SILENCE);
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.over {
                return Poll::Ready(None);
            }
            if let Poll::Ready(event) = self.events.poll_recv(context) {
                self.take(event);
                continue;
            }
            match self.alive.as_mut().poll(context) {
                Poll::Ready(()) => self.comment("still there"),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
