//! What a prompt gains from more threads than this machine has: the fork-joins of the demo model, recorded, and
//! simulated.

use std::path::Path;
use std::sync::Arc;

use larder_engine::{Session, TokenInput};
use larder_kernels::{RecordedRun, ThreadPool, WakeCosts};
use larder_model::ComputeContext;

use crate::cache::gpu::demo;
use crate::support::rig::open;

/// Threads, and the least that a prompt is faster on them than on one.
const GAINS: [(usize, f64); 4] = [(4, 2.7), (8, 3.8), (16, 4.7), (32, 5.2)];

/// Recordings of a prompt, of which the shortest times count.
const RECORDINGS: usize = 8;

/// A prompt whose size was there before, divided as for this number of threads.
fn prompt(threads: usize) -> RecordedRun {
    let pool = Arc::new(ThreadPool::recording(threads));
    let compute = ComputeContext { pool: pool.clone(), ..ComputeContext::new(1, false).unwrap() };
    let model = open(Path::new(&demo())).on(compute);
    let mut experts = model.resident();
    let mut session = Session::new(&model.decoder, &mut experts, 512);
    let tokens: Vec<u32> = (0..512).map(|i| i * 7 % 500).collect();
    let mut record = || {
        session.rewind(0);
        pool.take_recorded();
        session.forward(&TokenInput::prompt(&tokens), &mut ()).unwrap();
        pool.take_recorded().unwrap()
    };
    record();
    let first = record();
    (1..RECORDINGS).fold(first, |least, _| least.shorter(&record()).expect("each time the same tasks"))
}

#[test]
fn a_prompt_gains_from_more_threads_than_there_are() {
    for (threads, least) in GAINS {
        let run = prompt(threads);
        let on = |threads: usize| run.on(&vec![1.0; threads], &WakeCosts::default());
        let (one, many) = (on(1), on(threads));
        let gain = one.time.as_secs_f64() / many.time.as_secs_f64();
        let alone = many.alone.as_secs_f64() / many.time.as_secs_f64();
        println!("{threads} threads: {gain:.2} times one, one thread alone for {:.1} %", 100.0 * alone);
        assert!(gain >= least, "{threads} threads: {gain} times one thread");
        // Cores of which half are half as fast take fewer tasks, and the others do not wait for them.
        let hybrid: Vec<f64> = (0..threads).map(|thread| if thread % 2 == 0 { 1.0 } else { 0.5 }).collect();
        let of_hybrid = run.on(&hybrid, &WakeCosts::default());
        assert!(of_hybrid.efficiency(&hybrid) > 0.8 * many.efficiency(&vec![1.0; threads]), "{threads} threads");
    }
}
