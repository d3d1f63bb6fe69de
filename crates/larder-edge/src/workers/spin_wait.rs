//! Spin waiting: to sleep and be woken takes longer than most replies.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::task::yield_now;

/// A thread that yields and gets its next turn later than this shares the processor with a busy thread. A worker on the
/// same machine that computes the pending reply keeps the processor for less.
const CONTENDED: Duration = Duration::from_millis(1);
/// Number of waits that then sleep instead of spinning: on a contended processor, only threads that have slept get a
/// turn without delay.
const SKIPS_WHEN_CONTENDED: u32 = 256;

/// Polls for a limited time, unless the processor is contended.
pub struct SpinWait {
    limit: Duration,
    /// Waits that are still to be skipped.
    skips_left: AtomicU32,
}

impl SpinWait {
    /// Spins for `limit` at most per wait.
    pub const fn new(limit: Duration) -> Self {
        SpinWait { limit, skips_left: AtomicU32::new(0) }
    }

    /// Polls until `poll` returns a value; `None` if the caller should sleep instead.
    pub async fn poll_until_ready<T>(&self, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
        if self.skips_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
            return poll();
        }
        let start = Instant::now();
        while start.elapsed() < self.limit {
            let found = poll();
            if found.is_some() {
                return found;
            }
            let before = Instant::now();
            std::thread::yield_now();
            if before.elapsed() > CONTENDED {
                self.skips_left.store(SKIPS_WHEN_CONTENDED, Relaxed);
                return poll();
            }
            yield_now().await;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ready_values_are_returned_spinning_or_not() {
        let spin = SpinWait::new(Duration::from_millis(50));
        let mut polls = 0;
        let third = spin.poll_until_ready(|| {
            polls += 1;
            (polls == 3).then_some(polls)
        });
        // On a contended processor it may give up before.
        assert!(matches!(third.await, Some(3) | None));
        spin.skips_left.store(2, Relaxed);
        assert_eq!(
            (spin.poll_until_ready(|| Some(1)).await, spin.poll_until_ready(|| None::<u8>).await),
            (Some(1), None)
        );
        assert_eq!(spin.skips_left.load(Relaxed), 0);
    }
}
