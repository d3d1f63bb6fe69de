//! Threads that take the tasks of one fork-join at a time.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use crate::crew::Crew;
use crate::{pin, processors};

thread_local! {
    /// Whether this thread is working on a task.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A fixed number of threads that share the tasks of one [`run`](Pool::run) after the other.
///
/// The thread that calls [`run`](Pool::run) works too. Tasks are claimed one by one, so a slow core does not hold the
/// rest. Between two runs the others spin for a moment and then sleep, so an idle pool costs nothing.
pub struct Pool {
    /// None if there are no workers.
    crew: Option<Arc<Crew>>,
    /// One run at a time.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads (at least one), the caller's among them.
    ///
    /// With `pin`, each of the others is bound to one of the strong processors that the caller may use, beginning with
    /// the second strongest. The caller's thread is left as it is, because threads that it starts later would be bound with it.
    ///
    /// # Errors
    /// If a thread cannot be had or cannot be bound.
    pub fn new(threads: usize, pin: bool) -> io::Result<Pool> {
        let processors = if pin { processors::strong()? } else { Vec::new() };
        let mut pool = Pool::alone();
        if threads <= 1 {
            return Ok(pool);
        }
        let crew = pool.crew.insert(Arc::new(Crew::new(threads)));
        for i in 1..threads {
            let (crew, processor) = (crew.clone(), processors.get(i % processors.len().max(1)).copied());
            let (report, started) = mpsc::channel();
            let worker = std::thread::Builder::new().name(format!("larder-{i}")).spawn(move || {
                let bound = processor.map_or(Ok(()), pin::bind);
                // A thread that is bound stays where it is.
                let allowed = pin::allowed().unwrap_or_default();
                let fine = bound.is_ok();
                if report.send(bound).is_ok() && fine {
                    INSIDE.set(true);
                    crew.serve(&allowed);
                }
            })?;
            pool.workers.push(worker);
            started.recv().map_err(io::Error::other)??;
        }
        Ok(pool)
    }

    /// A pool of the caller's thread alone.
    pub fn alone() -> Pool {
        Pool { crew: None, turn: Mutex::new(()), workers: Vec::new() }
    }

    /// How many threads work on a run.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` once with every number below `tasks`, in any order, on any of the threads, and returns when all
    /// calls are over.
    ///
    /// From inside a task the calls are made one after the other. Nothing is allocated.
    ///
    /// # Panics
    /// If a call does, once no call is under way any more.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let crew = match &self.crew {
            Some(crew) if tasks > 1 && !INSIDE.get() => crew,
            _ => return (0..tasks).for_each(task),
        };
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        INSIDE.set(true);
        // SAFETY: one run at a time, because this thread has the turn.
        let outcome = unsafe { crew.run(tasks, task) };
        INSIDE.set(false);
        drop(turn);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(crew) = &self.crew {
            crew.dismiss();
        }
        for worker in self.workers.drain(..) {
            worker.join().expect("a worker catches the panics of its tasks");
        }
    }
}

#[cfg(test)]
mod tests;
