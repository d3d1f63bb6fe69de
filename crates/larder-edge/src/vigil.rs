//! Staying awake for a moment: to sleep and be woken takes longer than most answers do.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::task::yield_now;

/// Whoever lets others go first and waits longer than that for his turn shares the processor with somebody who is busy;
/// a worker on the same machine, which computes what is waited for, takes less.
const CROWDED: Duration = Duration::from_millis(1);
/// So many moments are slept through then: on a busy processor only those who slept are let in at once.
const SLEPT: u32 = 256;

/// Looks for something, for so long at most.
pub struct Vigil {
    most: Duration,
    /// Moments that are still to be slept through.
    slept: AtomicU32,
}

impl Vigil {
    /// For `most` at a time.
    pub const fn new(most: Duration) -> Self {
        Vigil { most, slept: AtomicU32::new(0) }
    }

    /// Looks until `seen` gives something; none if it is time to sleep.
    pub async fn keep<T>(&self, mut seen: impl FnMut() -> Option<T>) -> Option<T> {
        if self.slept.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
            return seen();
        }
        let start = Instant::now();
        while start.elapsed() < self.most {
            let found = seen();
            if found.is_some() {
                return found;
            }
            let before = Instant::now();
            std::thread::yield_now();
            if before.elapsed() > CROWDED {
                self.slept.store(SLEPT, Relaxed);
                return seen();
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
        let vigil = Vigil::new(Duration::from_millis(50));
        let mut looks = 0;
        let third = vigil.keep(|| {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        // On a crowded processor it may sleep before.
        assert!(matches!(third.await, Some(3) | None));
        vigil.slept.store(2, Relaxed);
        assert_eq!((vigil.keep(|| Some(1)).await, vigil.keep(|| None::<u8>).await), (Some(1), None));
        assert_eq!(vigil.slept.load(Relaxed), 0);
    }
}
