//! Where requests wait for the decoder: bounded, first come, first served.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;

use crate::error::ApiError;
use crate::job::{CHANNEL, Event, Job};

/// Most questions to the engine that wait at a time.
const QUESTIONS: usize = 64;

/// Requests that wait, and questions to the engine itself.
pub struct Queue {
    inner: Mutex<Inner>,
    wake: Condvar,
    limit: usize,
    places: usize,
}

#[derive(Default)]
struct Inner {
    jobs: VecDeque<Job>,
    questions: VecDeque<Question>,
    active: usize,
    closing: bool,
}

/// What the decode thread answers between tokens.
pub enum Question {
    /// How does the engine stand?
    State(oneshot::Sender<Value>),
    /// Choose experts by this strategy.
    Route(String, oneshot::Sender<Result<Value, String>>),
}

/// What to do next.
pub enum Next {
    /// Answer this.
    Job(Box<Job>),
    /// Tell or change something.
    Question(Question),
    /// Nothing new.
    Nothing,
    /// Nothing, and there never will be.
    Closed,
}

impl Queue {
    /// An empty queue in which `limit` requests may wait for `places` at the decoder.
    pub fn new(limit: usize, places: usize) -> Self {
        Queue { inner: Mutex::default(), wake: Condvar::new(), limit, places }
    }

    /// Puts a request in. `seconds` is how long one takes, to say when to try again.
    pub fn submit(&self, job: Job, seconds: f64) -> Result<(), ApiError> {
        let mut inner = self.lock();
        if inner.closing {
            return Err(ApiError::closing());
        }
        inner.forget_the_gone();
        let free = self.places.saturating_sub(inner.active);
        let before = inner.jobs.len();
        if before >= self.limit + free {
            let wait = seconds * (before + 1) as f64 / self.places.max(1) as f64;
            return Err(ApiError::busy(before, wait.clamp(1.0, 60.0).ceil() as u64));
        }
        if before >= free {
            // A full channel would mean that it was told before.
            let _ = job.to.try_send(Event::Waiting(before + 1 - free));
        }
        inner.jobs.push_back(job);
        drop(inner);
        self.wake.notify_all();
        Ok(())
    }

    /// Asks the engine.
    pub fn ask(&self, question: Question) -> Result<(), ApiError> {
        let mut inner = self.lock();
        if inner.closing {
            return Err(ApiError::closing());
        }
        if inner.questions.len() >= QUESTIONS {
            return Err(ApiError::busy(inner.questions.len(), 1));
        }
        inner.questions.push_back(question);
        drop(inner);
        self.wake.notify_all();
        Ok(())
    }

    /// What comes next while `active` answers are under way; waits for it up to `patience`.
    pub fn next(&self, active: usize, patience: Duration) -> Next {
        let mut inner = self.lock();
        inner.active = active;
        inner.forget_the_gone();
        if inner.is_idle(self.places) && !inner.closing && !patience.is_zero() {
            inner = self.wake.wait_timeout(inner, patience).unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(question) = inner.questions.pop_front() {
            return Next::Question(question);
        }
        if active < self.places
            && let Some(job) = inner.jobs.pop_front()
        {
            inner.active += 1;
            for (i, waiting) in inner.jobs.iter().enumerate() {
                // Room is kept for what comes last.
                if waiting.to.capacity() > CHANNEL / 2 {
                    let _ = waiting.to.try_send(Event::Waiting(i + 1));
                }
            }
            return Next::Job(Box::new(job));
        }
        if inner.closing && active == 0 { Next::Closed } else { Next::Nothing }
    }

    /// Takes no more; what waits is refused.
    pub fn close(&self) {
        let mut inner = self.lock();
        inner.closing = true;
        for job in inner.jobs.drain(..) {
            let _ = job.to.try_send(Event::Failed(ApiError::closing()));
        }
        inner.questions.clear();
        drop(inner);
        self.wake.notify_all();
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closing
    }

    /// Requests that wait, and those that are being answered.
    pub fn lengths(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.jobs.len(), inner.active)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing here panics halfway through a change.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn is_idle(&self, places: usize) -> bool {
        self.questions.is_empty() && (self.jobs.is_empty() || self.active >= places)
    }

    /// Whoever hung up waits no longer; whoever waited too long is told so.
    fn forget_the_gone(&mut self) {
        let now = std::time::Instant::now();
        self.jobs.retain(|job| {
            let late = now >= job.deadline;
            if late {
                let seconds = (job.deadline - job.since).as_secs();
                let _ = job.to.try_send(Event::Failed(ApiError::late(seconds)));
            }
            !late && !job.to.is_closed()
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use larder_engine::{Sampler, Sampling, StopMatcher};
    use tokio::sync::mpsc;

    use super::*;

    fn job(number: u64, patience: Duration) -> (Job, mpsc::Receiver<Event>) {
        let (to, events) = mpsc::channel(CHANNEL);
        let now = Instant::now();
        let job = Job {
            number,
            prompt: vec![1],
            sampler: Sampler::new(Sampling::default(), 0).unwrap(),
            stop: StopMatcher::new(vec![]).unwrap(),
            max_tokens: 1,
            ignore_eos: false,
            logprobs: None,
            since: now,
            deadline: now + patience,
            to,
        };
        (job, events)
    }

    fn next(queue: &Queue, active: usize) -> Option<u64> {
        match queue.next(active, Duration::ZERO) {
            Next::Job(job) => Some(job.number),
            _ => None,
        }
    }

    #[test]
    fn it_is_bounded_and_first_come_first_served() {
        let queue = Queue::new(2, 1);
        let long = Duration::from_secs(60);
        let mut waiting = Vec::new();
        for number in 0..3 {
            let (job, events) = job(number, long);
            queue.submit(job, 4.0).unwrap();
            waiting.push(events);
        }
        let refused = queue.submit(job(3, long).0, 4.0).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.retry_after), (429, Some(16)));
        assert!(matches!(waiting[2].try_recv(), Ok(Event::Waiting(2))));
        assert_eq!((next(&queue, 0), next(&queue, 1)), (Some(0), None));
        assert!(matches!(waiting[2].try_recv(), Ok(Event::Waiting(2))));
        // Whoever hangs up makes room.
        waiting.remove(1);
        let (last, _events) = job(4, long);
        queue.submit(last, 4.0).unwrap();
        assert_eq!((next(&queue, 0), next(&queue, 0), next(&queue, 0)), (Some(2), Some(4), None));
    }

    #[test]
    fn who_waits_too_long_or_when_it_closes_is_told() {
        let queue = Queue::new(4, 1);
        let (late, mut events) = job(0, Duration::ZERO);
        queue.submit(late, 1.0).unwrap();
        assert_eq!(next(&queue, 0), None);
        assert!(matches!(events.try_recv(), Ok(Event::Failed(error)) if error.code == Some("timeout")));
        let (other, mut events) = job(1, Duration::from_secs(60));
        queue.submit(other, 1.0).unwrap();
        queue.close();
        assert!(matches!(events.try_recv(), Ok(Event::Failed(error)) if error.code == Some("shutting_down")));
        assert!(matches!(queue.next(0, Duration::ZERO), Next::Closed));
        assert!(matches!(queue.next(1, Duration::ZERO), Next::Nothing));
        assert_eq!(queue.submit(job(2, Duration::ZERO).0, 1.0).unwrap_err().status.as_u16(), 503);
    }
}
