//! The time that computing takes, and which part of it is the work of one thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use larder_kernels::{PoolActivity, ThreadPool};

/// Nanoseconds so far, summed over all users of the context.
#[derive(Default)]
pub struct ComputeClocks {
    pub(crate) products: AtomicU64,
    pub(crate) attention: AtomicU64,
    /// Values of rows that were written in fork-joins.
    pub(crate) row_values_shared: AtomicU64,
}

impl ComputeClocks {
    /// Does work that writes `values` values of rows, which are counted as those of all threads if it has a fork-join.
    pub(crate) fn shared<T>(&self, pool: &ThreadPool, values: usize, work: impl FnOnce() -> T) -> T {
        let before = pool.fork_joins();
        let done = work();
        if pool.fork_joins() > before {
            self.row_values_shared.fetch_add(values as u64, Relaxed);
        }
        done
    }
}

/// Time of a pass in multi-threaded kernels; the rest of the pass is overhead.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ComputeTime {
    /// Matmuls with weights.
    pub products: Duration,
    /// Attention over the KV cache.
    pub attention: Duration,
    /// Fork-joins and wake-ups of the thread pool.
    pub pool: PoolActivity,
    /// Rows on the CPU.
    pub rows: RowValues,
}

larder_core::fieldwise!(ComputeTime { products, attention, pool, rows });

/// How much of the rows of a pass is the work of one thread, counted without a clock.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RowValues {
    /// Values of rows that were written.
    pub written: u64,
    /// Part of that: in fork-joins.
    pub shared: u64,
}

larder_core::fieldwise!(RowValues { written, shared });

impl RowValues {
    /// Values of rows that one thread wrote, and the others had nothing to do.
    pub fn alone(&self) -> u64 {
        self.written.saturating_sub(self.shared)
    }
}

pub(crate) fn timed<R>(nanos: &AtomicU64, work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = work();
    nanos.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
    result
}
