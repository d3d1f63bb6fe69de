//! The thread pool: threads that share the tasks of one fork-join at a time.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::disjoint::Disjoint;
use larder_os::{affinity, strongest_first};

mod recorded;
mod shared;

use recorded::TaskRecorder;
pub use recorded::{RecordedForkJoin, RecordedRun, SimulatedRun, WakeCosts};
use shared::PoolShared;

thread_local! {
    /// Whether this thread is executing a task.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A fixed number of threads that share the tasks of one fork-join ([`run`](ThreadPool::run)) after another.
///
/// The thread that calls [`run`](ThreadPool::run) works too. Tasks are claimed one by one, so a slow core does not
/// delay the rest. Between two runs the workers spin for 50 µs and then sleep, so an idle pool takes no processor time.
pub struct ThreadPool {
    /// `None` if the pool has no workers.
    shared: Option<Arc<PoolShared>>,
    /// Held during a run: there is one run at a time.
    run_lock: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    /// Of a pool that has one thread and divides work as if it had this many, the number and what is recorded.
    pretended: Option<(usize, Mutex<TaskRecorder>)>,
    fork_joins: AtomicU64,
    /// Nanoseconds that callers spent in them.
    within: AtomicU64,
    /// Nanoseconds of these in which they had nothing to do but to wait.
    waited: AtomicU64,
}

/// What a pool has done so far. A rising number of wake-ups per fork-join says that threads fall asleep between the
/// fork-joins of a token.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolActivity {
    /// Runs that were shared between threads.
    pub fork_joins: u64,
    /// Workers woken from sleep for them.
    pub wakeups: u64,
    /// Time that callers spent in them; the rest of their time is that of one thread.
    pub within: Duration,
    /// Part of that: the caller's own tasks were done, and others were not.
    pub waited: Duration,
}

larder_core::fieldwise!(PoolActivity { fork_joins, wakeups, within, waited });

impl ThreadPool {
    /// A pool of `threads` threads (at least one), including the caller's.
    ///
    /// With `pin`, each worker is bound to one of the performance cores that the caller may use, beginning with the
    /// second strongest. The caller's thread is not bound, because threads that it starts later would inherit the
    /// affinity.
    ///
    /// # Errors
    /// If a thread cannot be started or cannot be bound.
    pub fn new(threads: usize, pin: bool) -> io::Result<ThreadPool> {
        let processors = if pin { strongest_first()? } else { Vec::new() };
        let mut pool = ThreadPool::single_threaded();
        if threads <= 1 {
            return Ok(pool);
        }
        let shared = pool.shared.insert(Arc::new(PoolShared::new(threads)));
        for i in 1..threads {
            let (shared, processor) = (shared.clone(), processors.get(i % processors.len().max(1)).copied());
            let (report, started) = mpsc::channel();
            let worker = std::thread::Builder::new().name(format!("larder-{i}")).spawn(move || {
                let bound = processor.map_or(Ok(()), affinity::bind);
                // One processor if the thread is bound, which then never moves.
                let allowed = affinity::allowed().unwrap_or_default();
                let fine = bound.is_ok();
                if report.send(bound).is_ok() && fine {
                    IN_TASK.set(true);
                    shared.run_worker(i, &allowed);
                }
            })?;
            pool.workers.push(worker);
            started.recv().map_err(io::Error::other)??;
        }
        Ok(pool)
    }

    /// A pool without workers: tasks run on the caller's thread.
    pub fn single_threaded() -> ThreadPool {
        let [fork_joins, within, waited] = [(); 3].map(|()| AtomicU64::new(0));
        let (shared, run_lock, workers, pretended) = Default::default();
        ThreadPool { shared, run_lock, workers, pretended, fork_joins, within, waited }
    }

    /// A pool without workers that divides work as if it had `threads` threads, and records how long each task takes.
    pub fn recording(threads: usize) -> ThreadPool {
        let mut pool = ThreadPool::single_threaded();
        pool.pretended = Some((threads, Mutex::new(TaskRecorder::new())));
        pool
    }

    /// What a recording pool has recorded since the last call.
    pub fn take_recorded(&self) -> Option<RecordedRun> {
        let (_, recorder) = self.pretended.as_ref()?;
        Some(recorder.lock().unwrap_or_else(PoisonError::into_inner).take())
    }

    /// Number of threads that work on a run, including the caller's.
    pub fn threads(&self) -> usize {
        self.pretended.as_ref().map_or(self.workers.len() + 1, |(threads, _)| *threads)
    }

    /// Sets how many of the threads work on runs from now on, at least that of the caller and at most all. The others
    /// sleep. What a run computes does not depend on it.
    pub fn use_threads(&self, threads: usize) {
        self.shared.iter().for_each(|shared| shared.use_threads(threads.clamp(1, self.threads())));
    }

    /// Number of threads that may work on a run.
    pub fn threads_in_use(&self) -> usize {
        self.shared.as_ref().map_or(1, |shared| shared.threads_in_use())
    }

    /// What it has done so far.
    pub fn activity(&self) -> PoolActivity {
        let wakeups = self.shared.as_ref().map_or(0, |shared| shared.wakeups());
        let [within, waited] = [&self.within, &self.waited].map(|nanos| Duration::from_nanos(nanos.load(Relaxed)));
        PoolActivity { fork_joins: self.fork_joins(), wakeups, within, waited }
    }

    /// Calls `task` once with every number below `tasks`, in any order, on any of the threads, and returns when all
    /// calls have returned.
    ///
    /// A run that is started inside a task makes its calls one after another on the same thread. Allocates nothing.
    ///
    /// # Panics
    /// If a call panics; the panic is resumed here after all calls have ended.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let is_shared = tasks > 1 && !IN_TASK.get();
        let shared = match (&self.shared, &self.pretended) {
            (Some(shared), _) if is_shared => shared,
            (_, Some((_, recorder))) if is_shared => return self.record(recorder, tasks, task),
            _ => return (0..tasks).for_each(task),
        };
        let guard = self.run_lock.lock().unwrap_or_else(PoisonError::into_inner);
        IN_TASK.set(true);
        let start = Instant::now();
        // SAFETY: one run at a time, because this thread holds the run lock.
        let (outcome, waited) = unsafe { shared.run(tasks, task) };
        self.fork_joins.fetch_add(1, Relaxed);
        self.within.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        self.waited.fetch_add(waited.as_nanos() as u64, Relaxed);
        IN_TASK.set(false);
        drop(guard);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    }

    fn record(&self, recorder: &Mutex<TaskRecorder>, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.fork_joins.fetch_add(1, Relaxed);
        IN_TASK.set(true);
        recorder.lock().unwrap_or_else(PoisonError::into_inner).run(tasks, task);
        IN_TASK.set(false);
    }

    /// Runs so far that were shared between threads.
    pub fn fork_joins(&self) -> u64 {
        self.fork_joins.load(Relaxed)
    }
}

impl ThreadPool {
    /// Shares `values` in chunks of `chunk`, the last of which may be smaller: `task` gets the number of a chunk, and
    /// its values. Allocates nothing.
    pub fn run_chunks<T: Send>(&self, values: &mut [T], chunk: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (len, values) = (values.len(), Disjoint::new(values));
        self.run(len.div_ceil(chunk), &|number| {
            let at = number * chunk;
            // SAFETY: every task has a chunk of its own.
            task(number, unsafe { values.slice(at, chunk.min(len - at)) });
        });
    }

    /// As [`run_chunks`](Self::run_chunks), of two slices, each with the length of its chunks. The caller guarantees
    /// that they have as many.
    pub fn run_pairs<A: Send, B: Send>(
        &self,
        (a, a_chunk): (&mut [A], usize),
        (b, b_chunk): (&mut [B], usize),
        task: &(impl Fn(usize, &mut [A], &mut [B]) + Sync),
    ) {
        let (b_len, b) = (b.len(), Disjoint::new(b));
        self.run_chunks(a, a_chunk, &|number, a| {
            let at = number * b_chunk;
            // SAFETY: every task has a chunk of its own.
            task(number, a, unsafe { b.slice(at, b_chunk.min(b_len - at)) });
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.shut_down();
        }
        for worker in self.workers.drain(..) {
            worker.join().expect("a worker catches the panics of its tasks");
        }
    }
}

#[cfg(test)]
mod tests;
