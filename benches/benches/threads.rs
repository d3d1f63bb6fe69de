//! What a prompt and decoding gain from more threads than this machine has: what each thread would do is recorded on
//! one, divided as for some number of threads, and simulated with that many.
//!
//!     cargo bench -p larder-benches --bench threads -- STORE [PROMPT [TOKENS]]
//!
//! All experts are in memory. Memory that threads share, and clocks that fall when many cores work, are not simulated.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use larder_core::Xoshiro256;
use larder_engine::{Session, TokenInput};
use larder_kernels::{RecordedRun, ThreadPool, WakeCosts};
use larder_model::ComputeContext;
use larder_runtime::{ModelOptions, OpenModel};

/// Threads by their speeds, 1 for that of this machine's.
const MACHINES: [(&str, usize, usize); 6] =
    [("2", 2, 0), ("4", 4, 0), ("8", 8, 0), ("8, and 8 of half the speed", 8, 8), ("16", 16, 0), ("32", 32, 0)];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some((store, numbers)) = args.split_first() else {
        println!("skipped: name a store: STORE [PROMPT [TOKENS]]");
        return Ok(());
    };
    let number = |at: usize| numbers.get(at).map(|text: &String| text.parse::<usize>()).transpose();
    let (prompt, tokens) = (number(0)?.unwrap_or(1024), number(1)?.unwrap_or(32));
    let model = OpenModel::open(Path::new(store), &ModelOptions::default())?;
    println!("prompt of {prompt}, {tokens} tokens; shares of time: one thread alone, and what all threads together do");
    println!(
        "| threads | prompt: one thread | efficiency | times 2 threads | decode: one thread | efficiency | times 2 threads |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let mut of_two = None;
    for (name, fast, slow) in MACHINES {
        let speeds: Vec<f64> = [vec![1.0; fast], vec![0.5; slow]].concat();
        let runs = record(&model, speeds.len(), prompt, tokens)?;
        let simulated = runs.map(|run| run.on(&speeds, &WakeCosts::default()));
        let two = *of_two.get_or_insert(simulated.map(|run| run.time));
        let cells = simulated.iter().zip(two).map(|(run, two)| {
            let share = 100.0 * run.alone.as_secs_f64() / run.time.as_secs_f64();
            let times = two.as_secs_f64() / run.time.as_secs_f64();
            format!("{share:.1} % | {:.0} % | {times:.2}", 100.0 * run.efficiency(&speeds))
        });
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    Ok(())
}

/// A prompt whose size was there before, and the tokens behind it.
fn record(model: &OpenModel, threads: usize, prompt: usize, tokens: usize) -> Result<[RecordedRun; 2], Box<dyn Error>> {
    let pool = Arc::new(ThreadPool::recording(threads));
    let compute = Arc::new(ComputeContext { pool: pool.clone(), ..ComputeContext::new(1, false)? });
    let (decoder, mut experts) = (model.decoder(&compute)?, model.all_resident(&compute)?);
    let mut rng = Xoshiro256::new(7);
    let mut ids = |count: usize| (0..count).map(|_| (rng.bits() % decoder.vocab() as u64) as u32).collect::<Vec<_>>();
    let recorded = || pool.take_recorded().expect("the pool records");
    let mut session = Session::new(&decoder, &mut experts, prompt + tokens);
    session.forward(&TokenInput::prompt(&ids(prompt)), &mut ())?;
    session.rewind(0);
    recorded();
    session.forward(&TokenInput::prompt(&ids(prompt)), &mut ())?;
    let of_prompt = recorded();
    for id in ids(tokens) {
        session.forward(&TokenInput::decode(&[id]), &mut ())?;
    }
    Ok([of_prompt, recorded()])
}
