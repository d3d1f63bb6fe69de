//! Rates of several threads at the same work.

use std::time::{Duration, Instant};

use crate::thread_pool::ThreadPool;

/// A call is long beside what the threads need to begin together, and short beside the time for which another program
/// takes a processor.
const CALL_TIME: Duration = Duration::from_millis(2);

/// Rounds of a loop that take some milliseconds.
pub fn rounds(run: fn(u64)) -> u64 {
    let mut rounds = 1 << 10;
    loop {
        let start = Instant::now();
        run(rounds);
        if start.elapsed() >= CALL_TIME {
            return rounds;
        }
        rounds *= 2;
    }
}

/// The best rate per second at which the threads of a pool together do `amount`, in as many calls as begin within a
/// time. `part` is the work of a thread in a call, by their numbers.
pub fn best_rate(time: Duration, pool: &ThreadPool, amount: f64, part: impl Fn(usize, usize) + Sync) -> f64 {
    let (start, mut best) = (Instant::now(), 0.0f64);
    for call in 0.. {
        let begin = Instant::now();
        if begin - start >= time {
            break;
        }
        pool.run(pool.threads(), &|thread| part(call, thread));
        best = best.max(amount / begin.elapsed().as_secs_f64());
    }
    best
}
