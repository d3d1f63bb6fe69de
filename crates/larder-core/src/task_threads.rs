//! The interface of a thread pool, for crates that share work between threads without knowing the pool.

/// Threads that share the tasks of one fork-join at a time.
pub trait TaskThreads: Send + Sync {
    /// Calls `task` once with every number below `tasks`, in any order, on any of the threads, and returns when all
    /// calls have returned.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// The caller's thread alone.
pub struct CallerThread;

impl TaskThreads for CallerThread {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}
