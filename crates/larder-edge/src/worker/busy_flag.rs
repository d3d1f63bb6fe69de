//! The moment after an answer, in which the next request is looked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::spin_wait::SpinWait;

/// How long the moment is: layers of small models come as quickly.
const SPIN_LIMIT: Duration = Duration::from_micros(300);

/// Knows whether there is anything to do.
#[derive(Default)]
pub struct BusyFlag {
    busy: AtomicUsize,
    idle: Notify,
}

/// Something to do, until it is dropped.
pub struct BusyGuard(Arc<BusyFlag>);

impl BusyFlag {
    /// There is something to do: whoever computes has the processor to himself.
    pub fn begin(self: &Arc<Self>) -> BusyGuard {
        self.busy.fetch_add(1, Ordering::Relaxed);
        BusyGuard(self.clone())
    }

    /// Stays awake for a moment whenever everything is done. Ends with the runtime.
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
