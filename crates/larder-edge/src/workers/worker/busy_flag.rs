//! Spin waiting for the next request after a reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::workers::spin_wait::SpinWait;

/// Time of spinning after a reply: with small models the request for the next layer arrives within it.
const SPIN_LIMIT: Duration = Duration::from_micros(300);

/// Counts requests in progress.
#[derive(Default)]
pub struct BusyFlag {
    busy: AtomicUsize,
    /// Requests so far.
    begun: AtomicUsize,
    idle: Notify,
}

/// A request in progress; ends when it is dropped.
pub struct BusyGuard(Arc<BusyFlag>);

impl BusyFlag {
    /// Marks a request as in progress. Spinning stops, so that the computing thread has the processor to itself.
    pub fn begin(self: &Arc<Self>) -> BusyGuard {
        self.busy.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        BusyGuard(self.clone())
    }

    /// Number of requests in progress.
    pub fn in_progress(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    /// Number of requests that have begun so far.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::Relaxed)
    }

    /// Spins for a moment whenever the last request in progress has ended. Runs until the runtime is shut down.
    pub async fn spin_when_idle(self: Arc<Self>) {
        let spin = SpinWait::new(SPIN_LIMIT);
        loop {
            self.idle.notified().await;
            spin.poll_until_ready(|| (self.busy.load(Ordering::Relaxed) > 0).then_some(())).await;
        }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        if self.0.busy.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.idle.notify_one();
        }
    }
}
