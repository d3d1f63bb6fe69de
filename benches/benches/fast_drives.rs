//! What the cache itself allows on drives that are faster than this machine's: a layer's experts, read at 7 and 14 GB/s
//! and without a limit, checked by 1 to 16 threads.
//!
//! `cargo bench -p larder-benches --bench fast_drives` reads nothing: the reader completes each read when a drive of
//! that rate would have, and the slots hold the bytes already, as after a transfer that takes no processor. No expert
//! is computed. What is measured is all else on an expert's way: the ledger, the reader's interface, the window, the
//! checks. A drive's transfers also take memory bandwidth, which is not in it.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::{Cache, CacheScope, Shards, SlotSupply, pass_through_slots};
use larder_core::{ExpertId, ExpertLayout, Geometry, LayerIdx, NumberFormat, TaskThreads, WantedExpert};
use larder_kernels::ThreadPool;
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};
use larder_store::StoreError;
use larder_store::reader::{Arena, PacedReader, ReadCompletion, ReadRequest, Reader};
use twox_hash::XxHash3_128;

/// Sizes of Qwen3-30B-A3B.
const HIDDEN: usize = 2048;
const INTER: usize = 768;
const EXPERTS: usize = 128;
const TOP_K: usize = 8;
const LAYERS: u16 = 8;
/// Slots per layer.
const SLOTS: usize = 32;
const RATES: [Option<f64>; 3] = [Some(7e9), Some(14e9), None];
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
const READS_IN_FLIGHT: usize = 64;
const TIME: Duration = Duration::from_millis(1500);

fn main() -> Result<(), Box<dyn Error>> {
    // Building all benchmarks to test them is no reason to run them.
    if !std::env::args().any(|arg| arg == "--bench") {
        return Ok(());
    }
    let layout = ExpertLayout::new(HIDDEN, INTER, [NumberFormat::Q4_0; 3], false)?;
    let processors = std::thread::available_parallelism()?;
    println!(
        "experts of {} bytes, all {EXPERTS} of a layer wanted, {SLOTS} slots, {processors} processors\n",
        layout.bytes
    );
    println!("| drive | threads that check | GB/s | of it submitting | checking | waiting | else |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for rate in RATES {
        for threads in std::iter::once(None).chain(THREADS.map(Some)) {
            measure(&layout, rate, threads)?;
        }
    }
    Ok(())
}

/// Visits layers for a while; without `threads` nothing is checked.
fn measure(layout: &ExpertLayout, rate: Option<f64>, threads: Option<usize>) -> Result<(), Box<dyn Error>> {
    let layers: Vec<_> = (0..LAYERS).map(LayerIdx).collect();
    let geometry = Geometry {
        layers: layers.len(),
        moe_layers: layers.clone(),
        experts: EXPERTS,
        top_k: TOP_K,
        hidden: HIDDEN,
        inter: INTER,
        bias: false,
    };
    let shape = CacheShape::new(&geometry, SLOTS, CacheScope::Layer);
    let policies = "lru".parse::<EvictionSpec>()?.make(&shape, &PolicyInputs::default())?;
    let (_arena, mut memory) = Arena::new(shape.total_slots() + pass_through_slots(&shape), layout.bytes)?;
    memory.iter_mut().for_each(|slot| slot.chunks_mut(8).for_each(|eight| eight.fill(eight.len() as u8)));
    let segments = layout.segments().map(|segment| XxHash3_128::oneshot(&memory[0][segment]));
    let shards = EqualShards { layout: layout.clone(), segments, checked: threads.is_some() };
    let drive =
        Drive { seconds_per_byte: rate.map_or(0.0, f64::recip), pending: VecDeque::new(), free_at: Instant::now() };
    let pool: Arc<dyn TaskThreads> = Arc::new(Pool(ThreadPool::new(threads.unwrap_or(1), false)?));
    let reader = Box::new(PacedReader::new(Box::new(drive))?);
    let supply = SlotSupply { memory, reader, shards: Box::new(shards), threads: pool };
    let mut cache = Cache::new(&geometry, &shape, policies, supply);
    let wanted: Vec<_> = (0..EXPERTS).map(|e| WantedExpert { expert: ExpertId(e as u16), tokens: 2 }).collect();

    let start = Instant::now();
    while start.elapsed() < TIME {
        for layer in &layers {
            cache.visit(*layer, &wanted, &[], &mut |_, _, _| {}, &|| ())?;
        }
    }
    let (time, traffic) = (start.elapsed(), cache.traffic());
    let share = |part: Duration| format!("{:.1} %", 100.0 * part.as_secs_f64() / time.as_secs_f64());
    println!(
        "| {} | {} | {:.1} | {} | {} | {} | {} |",
        rate.map_or("no limit".into(), |rate| format!("{} GB/s", rate / 1e9)),
        threads.map_or("none".into(), |threads| threads.to_string()),
        traffic.bytes() as f64 / time.as_secs_f64() / 1e9,
        share(traffic.submitting),
        share(traffic.checked),
        share(traffic.waited),
        share(time.saturating_sub(traffic.submitting + traffic.checked + traffic.waited)),
    );
    Ok(())
}

struct Pool(ThreadPool);

impl TaskThreads for Pool {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.0.run(tasks, task);
    }
}

/// Shards whose experts all have the same bytes.
struct EqualShards {
    layout: ExpertLayout,
    segments: [u128; 2],
    checked: bool,
}

impl Shards for EqualShards {
    fn layout(&self, _: LayerIdx) -> &ExpertLayout {
        &self.layout
    }

    fn data_start(&self) -> u64 {
        0
    }

    fn check_parts(&self) -> usize {
        self.segments.len()
    }

    fn check(&self, _: LayerIdx, _: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError> {
        let segment = self.layout.segments()[part].clone();
        assert!(
            !self.checked || XxHash3_128::oneshot(&data[segment]) == self.segments[part],
            "the slot is overwritten"
        );
        Ok(())
    }
}

/// A drive that transfers one read after the other at a fixed rate.
struct Drive {
    seconds_per_byte: f64,
    /// The reads in flight, with the times at which they complete.
    pending: VecDeque<(Instant, ReadRequest)>,
    /// When the last of them completes.
    free_at: Instant,
}

impl Reader for Drive {
    fn name(&self) -> &'static str {
        "drive"
    }

    fn capacity(&self) -> usize {
        READS_IN_FLIGHT
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        let room = READS_IN_FLIGHT - self.pending.len();
        for read in reads.drain(..room.min(reads.len())) {
            let transfer = Duration::from_secs_f64(read.len as f64 * self.seconds_per_byte);
            self.free_at = self.free_at.max(Instant::now()) + transfer;
            self.pending.push_back((self.free_at, read));
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        let (_, ReadRequest { slot, tag, .. }) = self.pending.pop_front_if(|(at, _)| *at <= Instant::now())?;
        Some(ReadCompletion { slot, tag, result: Ok(()) })
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        let (at, ReadRequest { slot, tag, .. }) = self.pending.pop_front()?;
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        Some(ReadCompletion { slot, tag, result: Ok(()) })
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }
}
