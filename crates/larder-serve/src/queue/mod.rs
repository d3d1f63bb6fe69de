//! The queue between the HTTP handlers and the decode thread: bounded, first come, first served.

pub mod job;

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::engine::RoutingChange;
use crate::error::ApiError;
use crate::queue::job::{CHANNEL, GenerationEvent, GenerationJob};
use crate::sequences::slots::SlotCommand;

/// Commands that may wait for the decode thread.
const COMMANDS_MAX: usize = 64;

/// Waiting requests, and commands to the engine.
pub struct RequestQueue {
    inner: Mutex<QueueState>,
    wake: Condvar,
    limit: usize,
    parallel: usize,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<GenerationJob>,
    commands: VecDeque<EngineCommand>,
    active: usize,
    closing: bool,
}

/// A command that the decode thread executes between steps.
pub enum EngineCommand {
    /// Report the engine's state.
    ReadState(oneshot::Sender<Value>),
    /// Change the routing and report the state, or the reason why not.
    SetRouting(RoutingChange, oneshot::Sender<Result<Value, String>>),
    /// List the slots.
    ListSlots(oneshot::Sender<Value>),
    /// Save, restore or erase a slot.
    Slot(SlotCommand),
}

/// The decode thread's next task.
pub enum NextTask {
    /// Start a request.
    Generate(Box<GenerationJob>),
    /// Execute a command.
    Engine(EngineCommand),
    /// Go on with the active requests.
    Idle,
    /// End: the queue is closed and no request is active.
    Closed,
}

impl RequestQueue {
    /// An empty queue for `limit` waiting requests, of which `parallel` are active at a time.
    pub fn new(limit: usize, parallel: usize) -> Self {
        RequestQueue { inner: Mutex::default(), wake: Condvar::new(), limit, parallel }
    }

    /// Adds a request. `seconds` is the usual time of a request, from which `Retry-After` is estimated.
    pub fn submit(&self, job: GenerationJob, seconds: f64) -> Result<(), ApiError> {
        let mut inner = self.inner.lock();
        if inner.closing {
            return Err(ApiError::shutting_down());
        }
        inner.drop_expired();
        let free = self.parallel.saturating_sub(inner.active);
        let before = inner.jobs.len();
        if before >= self.limit + free {
            let wait = seconds * (before + 1) as f64 / self.parallel.max(1) as f64;
            return Err(ApiError::too_many_requests(
                before,
                "requests are waiting",
                wait.clamp(1.0, 60.0).ceil() as u64,
            ));
        }
        if before >= free {
            // The channel is new, so there is room for the event.
            let _ = job.events.try_send(GenerationEvent::Queued(before + 1 - free));
        }
        inner.jobs.push_back(job);
        drop(inner);
        self.wake.notify_all();
        Ok(())
    }

    /// Adds a command to the engine.
    pub fn command(&self, command: EngineCommand) -> Result<(), ApiError> {
        let mut inner = self.inner.lock();
        if inner.closing {
            return Err(ApiError::shutting_down());
        }
        if inner.commands.len() >= COMMANDS_MAX {
            return Err(ApiError::too_many_requests(inner.commands.len(), "commands are waiting", 1));
        }
        inner.commands.push_back(command);
        drop(inner);
        self.wake.notify_all();
        Ok(())
    }

    /// The next task while `active` requests are being generated; waits for one up to `patience`. The first request in
    /// the queue starts if it `fits`; those behind it wait with it.
    pub fn next(&self, active: usize, patience: Duration, fits: impl Fn(&GenerationJob) -> bool) -> NextTask {
        let mut inner = self.inner.lock();
        inner.active = active;
        inner.drop_expired();
        if inner.is_idle(self.parallel) && !inner.closing && !patience.is_zero() {
            self.wake.wait_for(&mut inner, patience);
        }
        if let Some(command) = inner.commands.pop_front() {
            return NextTask::Engine(command);
        }
        if active < self.parallel
            && let Some(job) = inner.jobs.pop_front_if(|job| fits(job))
        {
            inner.active += 1;
            for (i, waiting) in inner.jobs.iter().enumerate() {
                // Room is kept for the final event.
                if waiting.events.capacity() > CHANNEL / 2 {
                    let _ = waiting.events.try_send(GenerationEvent::Queued(i + 1));
                }
            }
            return NextTask::Generate(Box::new(job));
        }
        if inner.closing && active == 0 { NextTask::Closed } else { NextTask::Idle }
    }

    /// Refuses waiting and new requests from now on.
    pub fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closing = true;
        for job in inner.jobs.drain(..) {
            let _ = job.events.try_send(GenerationEvent::Failed(ApiError::shutting_down()));
        }
        inner.commands.clear();
        drop(inner);
        self.wake.notify_all();
    }

    /// Whether [`close`](Self::close) was called.
    pub fn is_closed(&self) -> bool {
        self.inner.lock().closing
    }

    /// Numbers of waiting and of active requests.
    pub fn lengths(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        (inner.jobs.len(), inner.active)
    }
}

impl QueueState {
    fn is_idle(&self, parallel: usize) -> bool {
        self.commands.is_empty() && (self.jobs.is_empty() || self.active >= parallel)
    }

    /// Removes requests whose client has disconnected, and fails those past their deadline.
    fn drop_expired(&mut self) {
        let now = std::time::Instant::now();
        self.jobs.retain(|job| {
            let late = now >= job.deadline;
            if late {
                let seconds = (job.deadline - job.received).as_secs();
                let _ = job.events.try_send(GenerationEvent::Failed(ApiError::timed_out(seconds)));
            }
            !late && !job.events.is_closed()
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use larder_engine::{Sampler, Sampling};
    use larder_text::StopMatcher;
    use tokio::sync::mpsc;

    use super::*;

    fn job(number: u64, patience: Duration) -> (GenerationJob, mpsc::Receiver<GenerationEvent>) {
        let (to, events) = mpsc::channel(CHANNEL);
        let now = Instant::now();
        let job = GenerationJob {
            number,
            prompt: vec![1],
            turns: Default::default(),
            embeds: false,
            pictures: vec![],
            sampler: Sampler::new(Sampling::default(), 0).unwrap(),
            grammar: None,
            stop: StopMatcher::new(vec![]).unwrap(),
            echo: None,
            context: Default::default(),
            max_tokens: 1,
            ignore_eos: false,
            logprobs: None,
            show_marks: false,
            tells_progress: false,
            span: tracing::Span::none(),
            received: now,
            deadline: now + patience,
            events: to,
        };
        (job, events)
    }

    fn next(queue: &RequestQueue, active: usize) -> Option<u64> {
        match queue.next(active, Duration::ZERO, |_| true) {
            NextTask::Generate(job) => Some(job.number),
            _ => None,
        }
    }

    #[test]
    fn it_is_bounded_and_first_come_first_served() {
        let queue = RequestQueue::new(2, 1);
        let long = Duration::from_secs(60);
        let mut waiting = Vec::new();
        for number in 0..3 {
            let (job, events) = job(number, long);
            queue.submit(job, 4.0).unwrap();
            waiting.push(events);
        }
        let refused = queue.submit(job(3, long).0, 4.0).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (429, Some(16)));
        assert!(matches!(waiting[2].try_recv(), Ok(GenerationEvent::Queued(2))));
        assert_eq!((next(&queue, 0), next(&queue, 1)), (Some(0), None));
        assert!(matches!(waiting[2].try_recv(), Ok(GenerationEvent::Queued(2))));
        // A client that disconnects frees its place.
        waiting.remove(1);
        let (last, _events) = job(4, long);
        queue.submit(last, 4.0).unwrap();
        assert_eq!((next(&queue, 0), next(&queue, 0), next(&queue, 0)), (Some(2), Some(4), None));
    }

    #[test]
    fn expired_and_refused_requests_get_an_error() {
        let queue = RequestQueue::new(4, 1);
        let (late, mut events) = job(0, Duration::ZERO);
        queue.submit(late, 1.0).unwrap();
        assert_eq!(next(&queue, 0), None);
        assert!(matches!(events.try_recv(), Ok(GenerationEvent::Failed(error)) if error.code == Some("timeout")));
        let (other, mut events) = job(1, Duration::from_secs(60));
        queue.submit(other, 1.0).unwrap();
        queue.close();
        assert!(matches!(events.try_recv(), Ok(GenerationEvent::Failed(error)) if error.code == Some("shutting_down")));
        assert!(matches!(queue.next(0, Duration::ZERO, |_| true), NextTask::Closed));
        assert!(matches!(queue.next(1, Duration::ZERO, |_| true), NextTask::Idle));
        assert_eq!(queue.submit(job(2, Duration::ZERO).0, 1.0).unwrap_err().status.as_u16(), 503);
    }
}
