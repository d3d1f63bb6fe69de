//! The moment after an answer, in which the next request is looked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::vigil::Vigil;

/// How long the moment is: layers of small models come as quickly.
const MOMENT: Duration = Duration::from_micros(300);

/// Knows whether there is anything to do.
#[derive(Default)]
pub struct Watchful {
    busy: AtomicUsize,
    idle: Notify,
}

/// Something to do, until it is dropped.
pub struct Busy(Arc<Watchful>);

impl Watchful {
    /// There is something to do: whoever computes has the processor to himself.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Stays awake for a moment whenever everything is done. Ends with the runtime.
    pub async fn watch(self: Arc<Self>) {
        let vigil = Vigil::new(MOMENT);
        loop {
            self.idle.notified().await;
            vigil.keep(|| (self.busy.load(Ordering::Relaxed) > 0).then_some(())).await;
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.0.busy.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.idle.notify_one();
        }
    }
}
