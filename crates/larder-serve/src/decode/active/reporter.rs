//! Tells the client of a request how much of its prompt is computed, if it has asked for that.

use std::cell::Cell;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::EVENTS_PER_TURN;
use crate::queue::job::{GenerationEvent, PrefillProgress};

/// Least time between the last event and one in the middle of a step.
const PAUSE: Duration = Duration::from_secs(1);

/// Reports the progress of one prompt: at its beginning, at the end of each step, and now and then within a long one.
pub struct ProgressReporter {
    events: Sender<GenerationEvent>,
    total: usize,
    cached: usize,
    started: Instant,
    /// Tokens of the last event, and when it was sent.
    last: Cell<(usize, Instant)>,
}

impl ProgressReporter {
    /// For a prompt of `total` tokens that begins to be computed now, `cached` of which the prefix cache had.
    pub fn new(events: Sender<GenerationEvent>, total: usize, cached: usize) -> Self {
        let started = Instant::now();
        let reporter = ProgressReporter { events, total, cached, started, last: Cell::new((cached, started)) };
        reporter.send(cached);
        reporter
    }

    /// Reports that a step has computed all up to the token `processed`.
    pub fn computed(&self, processed: usize) {
        let processed = processed.min(self.total);
        // Tokens of a failed step, and of a request that was preempted, are computed again.
        if processed > self.last.get().0 {
            self.send(processed);
        }
    }

    /// The same in the middle of a step, unless something was reported just now.
    pub fn computing(&self, processed: usize) {
        if self.last.get().1.elapsed() >= PAUSE {
            self.computed(processed);
        }
    }

    /// Sends an event, unless it would take the place of text.
    fn send(&self, processed: usize) {
        if self.events.capacity() <= EVENTS_PER_TURN {
            return;
        }
        self.last.set((processed, Instant::now()));
        let ProgressReporter { total, cached, .. } = *self;
        let progress = PrefillProgress { total, cached, processed, time: self.started.elapsed() };
        let _ = self.events.try_send(GenerationEvent::Prefilled(progress));
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn reports_only_grow_and_leave_room_for_text() {
        let (to, mut from) = mpsc::channel(EVENTS_PER_TURN + 3);
        let reporter = ProgressReporter::new(to, 100, 10);
        // No more tokens than before are not reported, and no more than the prompt has.
        [40, 40, 30, 140, 140].into_iter().for_each(|processed| reporter.computed(processed));
        reporter.computing(100);
        let mut received = || match from.try_recv() {
            Ok(GenerationEvent::Prefilled(progress)) => Some((progress.total, progress.cached, progress.processed)),
            _ => None,
        };
        assert_eq!([received(), received(), received()], [10, 40, 100].map(|processed| Some((100, 10, processed))));
        assert_eq!(received(), None);

        let (to, from) = mpsc::channel(EVENTS_PER_TURN + 2);
        let reporter = ProgressReporter::new(to, 100, 0);
        (1..=100).for_each(|processed| reporter.computed(processed));
        assert_eq!(from.len(), 2, "a client that does not read");
    }

    #[test]
    fn a_long_step_reports_once_a_second() {
        let (to, from) = mpsc::channel(32);
        let reporter = ProgressReporter::new(to, 100, 0);
        reporter.computing(10);
        assert_eq!(from.len(), 1, "the beginning was reported just now");
        reporter.last.set((0, Instant::now().checked_sub(PAUSE).unwrap()));
        reporter.computing(20);
        reporter.computing(30);
        assert_eq!(from.len(), 2);
    }
}
