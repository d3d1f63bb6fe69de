//! The thread pool: threads that share the tasks of one fork-join at a time.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use crate::disjoint::Disjoint;
use crate::{affinity, processors};

mod shared;

use shared::PoolShared;

thread_local! {
    /// Whether this thread is executing a task.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A fixed number of threads that share the tasks of one fork-join ([`run`](ThreadPool::run)) after another.
///
/// The thread that calls [`run`](ThreadPool::run) works too. Tasks are claimed one by one, so a slow core does not delay
/// the rest. Between two runs the workers spin for 50 µs and then sleep, so an idle pool takes no processor time.
pub struct ThreadPool {
    /// `None` if the pool has no workers.
    shared: Option<Arc<PoolShared>>,
    /// Held during a run: there is one run at a time.
    run_lock: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    fork_joins: AtomicU64,
}

/// What a pool has done so far. A rising number of wake-ups per fork-join says that threads fall asleep between the
/// fork-joins of a token.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolActivity {
    /// Runs that were shared between threads.
    pub fork_joins: u64,
    /// Workers woken from sleep for them.
    pub wakeups: u64,
}

larder_core::fieldwise!(PoolActivity { fork_joins, wakeups });

impl ThreadPool {
    /// A pool of `threads` threads (at least one), including the caller's.
    ///
    /// With `pin`, each worker is bound to one of the performance cores that the caller may use, beginning with the second
    /// strongest. The caller's thread is not bound, because threads that it starts later would inherit the affinity.
    ///
    /// # Errors
    /// If a thread cannot be started or cannot be bound.
    pub fn new(threads: usize, pin: bool) -> io::Result<ThreadPool> {
        let processors = if pin { processors::strongest_first()? } else { Vec::new() };
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
        ThreadPool { shared: None, run_lock: Mutex::new(()), workers: Vec::new(), fork_joins: AtomicU64::new(0) }
    }

    /// Number of threads that work on a run, including the caller's.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Sets how many of the threads work on runs from now on, at least that of the caller and at most all. The others sleep. What a
    /// run computes does not depend on it.
    pub fn use_threads(&self, threads: usize) {
        self.shared.iter().for_each(|shared| shared.use_threads(threads.clamp(1, self.threads())));
    }

    /// Number of threads that may work on a run.
    pub fn threads_in_use(&self) -> usize {
        self.shared.as_ref().map_or(1, |shared| shared.threads_in_use())
    }

    /// Fork-joins and wake-ups so far.
    pub fn activity(&self) -> PoolActivity {
        let wakeups = self.shared.as_ref().map_or(0, |shared| shared.wakeups());
        PoolActivity { fork_joins: self.fork_joins.load(Relaxed), wakeups }
    }

    /// Calls `task` once with every number below `tasks`, in any order, on any of the threads, and returns when all
    /// calls have returned.
    ///
    /// A run that is started inside a task makes its calls one after another on the same thread. Allocates nothing.
    ///
    /// # Panics
    /// If a call panics; the panic is resumed here after all calls have ended.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let shared = match &self.shared {
            Some(shared) if tasks > 1 && !IN_TASK.get() => shared,
            _ => return (0..tasks).for_each(task),
        };
        let guard = self.run_lock.lock().unwrap_or_else(PoisonError::into_inner);
        IN_TASK.set(true);
        self.fork_joins.fetch_add(1, Relaxed);
        // SAFETY: one run at a time, because this thread holds the run lock.
        let outcome = unsafe { shared.run(tasks, task) };
        IN_TASK.set(false);
        drop(guard);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    }
}

impl ThreadPool {
    /// Shares `values` in chunks of `chunk`, the last of which may be smaller: `task` gets the number of a chunk, and its values. Allocates
    /// nothing.
    pub fn run_chunks<T: Send>(&self, values: &mut [T], chunk: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (len, values) = (values.len(), Disjoint::new(values));
        self.run(len.div_ceil(chunk), &|number| {
            let at = number * chunk;
            // SAFETY: every task has a chunk of its own.
            task(number, unsafe { values.slice(at, chunk.min(len - at)) });
        });
    }

    /// As [`run_chunks`](Self::run_chunks), of two slices, each with the length of its chunks. The caller guarantees that they have as many.
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
