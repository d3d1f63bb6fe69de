//! Peaks are measured wherever there are instructions for them.

use super::*;

#[test]
fn a_peak_has_a_rate_where_it_has_instructions() {
    for peak in Peak::all() {
        let (instructions, rate) = (peak.instructions(), peak.rate(&ThreadPool::single_threaded()));
        assert_eq!(instructions.is_some(), rate.is_some_and(|rate| rate > 1e6), "{} {rate:?}", peak.name);
    }
}

#[test]
#[ignore = "prints rates"]
fn peaks() {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    for threads in [1, threads] {
        let pool = ThreadPool::new(threads, false).unwrap();
        for peak in Peak::all() {
            let rate = peak.rate(&pool).map(|rate| rate / 1e9);
            println!("{threads} threads: {}, {:?}: {rate:.1?} G/s", peak.name, peak.instructions());
        }
        println!("{threads} threads: memory: {:.1} GB/s", memory_bandwidth(&pool) / 1e9);
    }
}
