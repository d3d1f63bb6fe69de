//! The state that the threads of a pool share, and the protocol by which work passes between them.
//!
//! A run stores its job, then the number of `unclaimed` tasks. A thread that lowers `unclaimed` by one has claimed a
//! task; only then does it read the job, which cannot be replaced before that task is done, because the run waits until
//! no task is `pending`. A thread without work spins and then sleeps. A sleeper counts itself before it loads
//! `unclaimed` for the last time, and a run counts sleepers after it has stored `unclaimed`, both sequentially
//! consistent, so one sees the other. The same holds for the run that sleeps and the last task. A store before such a
//! load is a swap: a processor's own store and load would do, but QEMU, which tests this for Arm on x86, lets the load
//! overtake the store.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use larder_os::affinity;

/// How long a thread spins before it sleeps. Between two fork-joins of a layer lie a norm, a softmax or a router, which
/// take 5 to 40 µs; sleeping and waking takes about 20. Spinning longer would take a processor from other programs.
pub(super) const SPIN: Duration = Duration::from_micros(50);

/// How many sleepers a thread wakes that finds work, so that many are woken by several.
pub(super) const WAKES: usize = 8;

/// Checks of the condition between two reads of the clock.
const CHECKS_PER_CLOCK_READ: usize = 32;

/// The payload of a panic.
pub type Panic = Box<dyn Any + Send>;

#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

/// A value on cache lines of its own, against false sharing; two lines, because processors fetch them in pairs.
#[repr(align(128))]
struct CachePadded<T>(T);

/// The shared state of a pool.
pub struct PoolShared {
    /// Tasks of the current run that no thread has claimed.
    unclaimed: CachePadded<AtomicUsize>,
    /// Tasks of the current run that are not done.
    pending: CachePadded<AtomicUsize>,
    job: CachePadded<UnsafeCell<Job>>,
    panic: Mutex<Option<Panic>>,
    /// The processor that the run was called on.
    caller_processor: AtomicUsize,
    /// How long to spin before sleeping.
    spin: Duration,
    /// Goes with both condition variables.
    sleep_lock: Mutex<()>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    work_ready: Condvar,
    /// Threads that may work, the caller's included. Workers with a number from here on sleep.
    in_use: AtomicUsize,
    used_again: Condvar,
    /// Whether the caller of the run sleeps or is about to.
    caller_sleeps: AtomicBool,
    all_done: Condvar,
    shutdown: AtomicBool,
    /// Workers woken from sleep so far.
    wakeups: AtomicU64,
}

// SAFETY: the job is the only part that is not Send and Sync by itself; it is written by the only run while no task is
// unclaimed or pending, and read by holders of a claimed task only.
unsafe impl Send for PoolShared {}
// SAFETY: as above.
unsafe impl Sync for PoolShared {}

impl PoolShared {
    /// For `threads` threads. If there are fewer processors, no thread spins, since that would keep others from
    /// working.
    pub fn new(threads: usize) -> PoolShared {
        let oversubscribed = std::thread::available_parallelism().is_ok_and(|n| n.get() < threads);
        PoolShared {
            unclaimed: CachePadded(AtomicUsize::new(0)),
            pending: CachePadded(AtomicUsize::new(0)),
            job: CachePadded(UnsafeCell::new(Job { task: &|_| {}, tasks: 0 })),
            panic: Mutex::new(None),
            caller_processor: AtomicUsize::new(usize::MAX),
            spin: if oversubscribed { Duration::ZERO } else { SPIN },
            sleep_lock: Mutex::new(()),
            sleepers: AtomicUsize::new(0),
            work_ready: Condvar::new(),
            in_use: AtomicUsize::new(threads),
            used_again: Condvar::new(),
            caller_sleeps: AtomicBool::new(false),
            all_done: Condvar::new(),
            shutdown: AtomicBool::new(false),
            wakeups: AtomicU64::new(0),
        }
    }

    /// Runs all tasks on the workers and on the caller, and returns the first panic of a task as an error.
    ///
    /// # Safety
    /// There is no other call at the same time.
    pub unsafe fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> (Result<(), Panic>, Duration) {
        // SAFETY: only the lifetime changes, and this function returns after the last use of the reference: a task is
        // called by holders of a claim only, and none is pending at the end.
        let task = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(task)
        };
        // SAFETY: there is no other run, and no task is unclaimed or pending, so no thread reads the job.
        unsafe { *self.job.0.get() = Job { task, tasks } };
        self.caller_processor.store(affinity::current().unwrap_or(usize::MAX), Relaxed);
        self.pending.0.store(tasks, Relaxed);
        self.unclaimed.0.swap(tasks, SeqCst);
        self.wake(tasks - 1);
        self.work();
        let done = Instant::now();
        self.wait_for_pending();
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        (panic.map_or(Ok(()), Err), done.elapsed())
    }

    /// The loop of a worker, whose number is at least 1: works on one run after another until shutdown.
    ///
    /// Schedulers tend to wake a thread on the processor of its waker, and take long to notice that the two then share
    /// it; so the worker moves off that processor by itself, to another one of the `allowed`.
    pub fn run_worker(&self, number: usize, allowed: &[usize]) {
        while !self.shutdown.load(Acquire) {
            self.wait_for_use(number);
            let caller = self.caller_processor.load(Relaxed);
            if affinity::current() == Some(caller) {
                affinity::move_off(caller, allowed);
            }
            self.work();
            self.wait_for_work(number);
        }
    }

    /// Makes all [`run_worker`](PoolShared::run_worker) calls return.
    pub fn shut_down(&self) {
        let _guard = self.sleep_lock();
        self.shutdown.store(true, SeqCst);
        self.work_ready.notify_all();
        self.used_again.notify_all();
    }

    /// Changes how many threads may work. A worker that is not used any more may still claim tasks of a run that it
    /// takes part in.
    pub fn use_threads(&self, threads: usize) {
        let _guard = self.sleep_lock();
        self.in_use.store(threads, SeqCst);
        // A worker beyond the number must not be the one that a run wakes.
        self.work_ready.notify_all();
        self.used_again.notify_all();
    }

    /// How many threads may work.
    pub fn threads_in_use(&self) -> usize {
        self.in_use.load(SeqCst)
    }

    /// Workers woken from sleep so far.
    pub fn wakeups(&self) -> u64 {
        self.wakeups.load(Relaxed)
    }

    /// Claims and executes tasks until none is unclaimed.
    fn work(&self) {
        while let Ok(unclaimed) = self.unclaimed.0.fetch_update(AcqRel, Relaxed, |unclaimed| unclaimed.checked_sub(1)) {
            // SAFETY: the run that stored the job waits for the task just claimed.
            let job = unsafe { *self.job.0.get() };
            // SAFETY: as above, so the closure that the job borrows is alive.
            let task = unsafe { &*job.task };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(job.tasks - unclaimed))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            if self.pending.0.fetch_sub(1, SeqCst) == 1 && self.caller_sleeps.load(SeqCst) {
                let _guard = self.sleep_lock();
                self.all_done.notify_one();
            }
        }
    }

    fn wait_for_pending(&self) {
        let done = || self.pending.0.load(SeqCst) == 0;
        if self.spin_until(done) {
            return;
        }
        let guard = self.sleep_lock();
        self.caller_sleeps.swap(true, SeqCst);
        drop(self.all_done.wait_while(guard, |()| !done()).unwrap_or_else(PoisonError::into_inner));
        self.caller_sleeps.store(false, SeqCst);
    }

    /// Sleeps while the worker is not used.
    fn wait_for_use(&self, number: usize) {
        if number < self.in_use.load(Acquire) {
            return;
        }
        let unused = || number >= self.in_use.load(SeqCst) && !self.shutdown.load(SeqCst);
        drop(self.used_again.wait_while(self.sleep_lock(), |()| unused()).unwrap_or_else(PoisonError::into_inner));
    }

    fn wait_for_work(&self, number: usize) {
        let must_leave = || number >= self.in_use.load(SeqCst) || self.shutdown.load(SeqCst);
        let ready = || self.unclaimed.0.load(SeqCst) > 0 || must_leave();
        if self.spin_until(ready) {
            return;
        }
        let guard = self.sleep_lock();
        self.sleepers.fetch_add(1, SeqCst);
        drop(self.work_ready.wait_while(guard, |()| !ready()).unwrap_or_else(PoisonError::into_inner));
        self.sleepers.fetch_sub(1, SeqCst);
        self.wake(self.unclaimed.0.load(SeqCst).saturating_sub(1));
    }

    /// Wakes some sleepers, if this many others could work; those that are woken wake more.
    fn wake(&self, wanted: usize) {
        let sleepers = self.sleepers.load(SeqCst).min(wanted).min(WAKES);
        if sleepers > 0 {
            // A sleeper that has counted itself holds the lock until it is asleep: from here on it gets the
            // notification.
            drop(self.sleep_lock());
            (0..sleepers).for_each(|_| self.work_ready.notify_one());
            self.wakeups.fetch_add(sleepers as u64, Relaxed);
        }
    }

    fn spin_until(&self, condition: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..CHECKS_PER_CLOCK_READ {
                if condition() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.spin {
                return false;
            }
        }
    }

    fn sleep_lock(&self) -> MutexGuard<'_, ()> {
        self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
