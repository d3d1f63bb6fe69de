//! How fast memory is read.

use std::hint::black_box;
use std::time::Duration;

use larder_os::memory;

use super::timing::best_rate;
use crate::thread_pool::ThreadPool;

/// Bytes that are read: more than the caches of a processor.
const BYTES: usize = 512 << 20;
/// Calls in which all of them are read once.
const CALLS: usize = 8;
/// Time for a number of threads.
const TIME: Duration = Duration::from_secs(1);
/// Places from which a thread reads at the same time, since it gets less from one place alone.
const STREAMS: usize = 4;
/// Words of a cache line.
const LINE: usize = 8;

/// Bytes per second that the threads of a pool together read from memory, in the best of many calls.
pub fn memory_bandwidth(pool: &ThreadPool) -> f64 {
    // Under a low limit the rate may be that of a large cache; more memory would end the process.
    let bytes = memory::available().map_or(BYTES, |bytes| BYTES.min((bytes / 4) as usize));
    let threads = pool.threads();
    let part = (bytes / size_of::<u64>() / CALLS / threads).next_multiple_of(STREAMS * LINE);
    let words = vec![1u64; part * CALLS * threads];
    let of = |call, thread| &words[(call % CALLS * threads + thread) * part..][..part];
    best_rate(TIME, pool, (part * threads * size_of::<u64>()) as f64, |call, thread| {
        _ = black_box(sum(of(call, thread)))
    })
}

/// The sum of all words, in as many lanes as the latency of additions does not count.
fn sum(words: &[u64]) -> u64 {
    let part = words.len() / STREAMS;
    let streams: [&[[u64; LINE]]; STREAMS] = std::array::from_fn(|i| words[i * part..][..part].as_chunks().0);
    let mut lanes = [0u64; LINE];
    for i in 0..part / LINE {
        for stream in streams {
            lanes.iter_mut().zip(stream[i]).for_each(|(lane, word)| *lane = lane.wrapping_add(word));
        }
    }
    lanes.iter().fold(0, |sum, lane| sum.wrapping_add(*lane))
}
