//! Staying awake for a moment: to sleep and be woken takes longer than most answers do.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::task::yield_now;

/// Whoever lets others go first and waits longer than that for his turn shares the processor with somebody who is busy;
/// a worker on the same machine, which computes what is waited for, takes less.
const CONTENDED: Duration = Duration::from_millis(1);
/// So many moments are slept through then: on a busy processor only those who slept are let in at once.
const SKIPS_WHEN_CONTENDED: u32 = 256;

/// Looks for something, for so long at most.
pub struct SpinWait {
    limit: Duration,
    /// Moments that are still to be slept through.
    skips_left: AtomicU32,
}

impl SpinWait {
    /// For `most` at a time.
    pub const fn new(limit: Duration) -> Self {
        SpinWait { limit, skips_left: AtomicU32::new(0) }
    }

    /// Looks until `seen` gives something; none if it is time to sleep.
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
    async fn what_is_there_is_seen_awake_or_not() {
        let spin = SpinWait::new(Duration::from_millis(50));
        let mut looks = 0;
        let third = spin.poll_until_ready(|| {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        // On a crowded processor it may sleep before.
        assert!(matches!(third.await, Some(3) | None));
        spin.skips_left.store(2, Relaxed);
        assert_eq!(
            (spin.poll_until_ready(|| Some(1)).await, spin.poll_until_ready(|| None::<u8>).await),
            (Some(1), None)
        );
        assert_eq!(spin.skips_left.load(Relaxed), 0);
    }
}
