//! Runs tasks on a few threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::error::{Result, StoreError};

/// Runs `count` tasks, started in order, on `threads` threads with one state each, and stops at the first error.
/// Returns the results in order.
///
/// While one thread waits for the disk another computes. There are no queues, and at most one task per thread is in
/// memory.
pub(crate) fn parallel<S, T: Send>(
    threads: usize,
    count: usize,
    state: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    let error: Mutex<Option<StoreError>> = Mutex::new(None);
    let work = || {
        let mut state = state();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count || failed.load(Ordering::Relaxed) {
                return;
            }
            match task(&mut state, i) {
                Ok(result) => results.lock()[i] = Some(result),
                Err(e) => {
                    failed.store(true, Ordering::Relaxed);
                    error.lock().get_or_insert(e);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
    });
    match error.into_inner() {
        Some(error) => Err(error),
        None => Ok(results.into_inner().into_iter().flatten().collect()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::error::StoreErrorKind;

    #[test]
    fn results_keep_their_order_and_the_first_error_stops() {
        let squares = parallel(3, 100, || 0usize, |_, i| Ok(i * i)).unwrap();
        assert_eq!(squares, (0..100).map(|i| i * i).collect::<Vec<_>>());
        let done = AtomicUsize::new(0);
        let error = parallel(
            2,
            1000,
            || (),
            |(), i| {
                done.fetch_add(1, Ordering::Relaxed);
                if i == 5 { Err(StoreError::new(StoreErrorKind::Io, Path::new("p"), "five")) } else { Ok(()) }
            },
        );
        assert_eq!(error.unwrap_err().message, "five");
        assert!(done.into_inner() < 1000);
    }
}
