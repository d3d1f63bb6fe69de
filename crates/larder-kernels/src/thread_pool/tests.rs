//! The thread pool: every task once, sleeping and waking, panics, nesting, pinning.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use super::*;

/// Fewer under Miri, which is a thousand times slower.
const RUNS: usize = if cfg!(miri) { 5 } else { 2000 };

#[test]
fn every_task_runs_exactly_once() {
    for threads in [1, 2, 3, 8, if cfg!(miri) { 4 } else { 64 }] {
        let pool = ThreadPool::new(threads, false).unwrap();
        assert_eq!(pool.threads(), threads);
        for run in 0..RUNS {
            let tasks = run * 7 % 41;
            let done: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|task| _ = done[task].fetch_add(1, Relaxed));
            assert!(done.iter().all(|n| n.load(Relaxed) == 1), "{threads} threads, run {run}");
        }
    }
}

#[test]
fn sleeping_workers_are_woken() {
    let pool = ThreadPool::new(4, false).unwrap();
    for _ in 0..RUNS.min(50) {
        std::thread::sleep(std::time::Duration::from_micros(300));
        let barrier = std::sync::Barrier::new(4);
        // Ends only if all four threads take part.
        pool.run(4, &|_| _ = barrier.wait());
    }
}

#[test]
fn threads_that_are_not_used_sleep_until_they_are_used_again() {
    let pool = ThreadPool::new(4, false).unwrap();
    let workers = || {
        // Those that took part in the last run may take part in one more.
        std::thread::sleep(std::time::Duration::from_millis(20));
        let seen = Mutex::new(std::collections::HashSet::new());
        for _ in 0..RUNS.min(50) {
            pool.run(40, &|_| {
                seen.lock().unwrap().insert(std::thread::current().id());
                std::thread::yield_now();
            });
        }
        seen.into_inner().unwrap().len()
    };
    for _ in 0..RUNS.min(5) {
        for threads in [1, 2, 3] {
            pool.use_threads(threads);
            assert_eq!(pool.threads_in_use(), threads);
            assert!(workers() <= threads);
        }
        pool.use_threads(9);
        let barrier = std::sync::Barrier::new(4);
        // Ends only if all four threads take part.
        pool.run(4, &|_| _ = barrier.wait());
    }
    pool.use_threads(1);
    assert_eq!((pool.threads(), pool.threads_in_use()), (4, 1));
}

#[test]
fn a_panic_is_resumed_after_all_tasks_have_ended() {
    let pool = ThreadPool::new(3, false).unwrap();
    for _ in 0..RUNS.min(100) {
        let done = AtomicUsize::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|task| {
                assert!(task != 11, "eleven");
                done.fetch_add(1, Relaxed);
            });
        }));
        assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Some(&"eleven"));
        assert_eq!(done.load(Relaxed), 19);
    }
    let done = AtomicUsize::new(0);
    pool.run(20, &|_| _ = done.fetch_add(1, Relaxed));
    assert_eq!(done.load(Relaxed), 20);
}

#[test]
fn a_run_inside_a_task_runs_on_the_same_thread() {
    let pool = ThreadPool::new(3, false).unwrap();
    let done = AtomicUsize::new(0);
    pool.run(10, &|_| pool.run(10, &|_| _ = done.fetch_add(1, Relaxed)));
    assert_eq!(done.load(Relaxed), 100);
}

#[test]
fn runs_from_several_threads_take_turns() {
    let pool = ThreadPool::new(3, false).unwrap();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..RUNS.min(200)).for_each(|_| pool.run(9, &|_| _ = done.fetch_add(1, Relaxed))));
        }
    });
    assert_eq!(done.load(Relaxed), 4 * 9 * RUNS.min(200));
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn pinned_workers_stay_on_one_processor() {
    let pool = ThreadPool::new(3, true).unwrap();
    let barrier = std::sync::Barrier::new(3);
    let caller = std::thread::current().id();
    pool.run(3, &|_| {
        barrier.wait();
        if std::thread::current().id() != caller {
            assert_eq!(affinity::allowed().unwrap().len(), 1);
        }
    });
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn an_idle_pool_takes_no_processor_time() {
    let pool = ThreadPool::new(2, false).unwrap();
    let (barrier, threads) = (std::sync::Barrier::new(2), Mutex::new(vec![]));
    pool.run(2, &|_| {
        barrier.wait();
        threads.lock().unwrap().push(rustix::thread::gettid().as_raw_nonzero());
    });
    let nanoseconds = || -> u64 {
        let of = |thread| std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap();
        threads.lock().unwrap().iter().map(|t| of(t).split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    std::thread::sleep(std::time::Duration::from_millis(20));
    let before = nanoseconds();
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(nanoseconds() - before < 5_000_000);
}
