//! The paced reader over a simulated SSD.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::*;
use crate::{
    error::{StoreError, StoreErrorKind},
    reader::{Arena, Slot},
};

const MB: usize = 1 << 20;

/// What the simulated SSD has seen.
#[derive(Default)]
struct Seen {
    nanos: AtomicU64,
    started: AtomicUsize,
    completed: AtomicUsize,
    bytes: AtomicU64,
    bytes_max: AtomicU64,
}

/// An SSD that completes reads in order and without touching their slots, at 2.5 GB/s on its own clock, and at a tenth
/// of it while more than `collapse` bytes are in flight. Each read takes `real` time.
struct Ssd {
    seen: Arc<Seen>,
    in_flight: VecDeque<ReadRequest>,
    collapse: u64,
    capacity: usize,
    real: Duration,
    /// The shard whose reads fail.
    broken: Option<usize>,
}

impl Ssd {
    fn new(collapse: usize) -> (Box<Self>, Arc<Seen>) {
        let seen = Arc::new(Seen::default());
        let ssd = Ssd {
            seen: seen.clone(),
            in_flight: VecDeque::new(),
            collapse: collapse as u64,
            capacity: 64,
            real: Duration::ZERO,
            broken: None,
        };
        (Box::new(ssd), seen)
    }
}

impl Reader for Ssd {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        let taken = reads.len().min(self.capacity - self.in_flight.len());
        for read in reads.drain(..taken) {
            let bytes = self.seen.bytes.fetch_add(read.len as u64, Ordering::Relaxed) + read.len as u64;
            self.seen.bytes_max.fetch_max(bytes, Ordering::Relaxed);
            self.seen.started.fetch_add(1, Ordering::Relaxed);
            self.in_flight.push_back(read);
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        None
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        let ReadRequest { shard, len, slot, tag, .. } = self.in_flight.pop_front()?;
        thread::sleep(self.real);
        let in_flight = self.seen.bytes.fetch_sub(len as u64, Ordering::Relaxed);
        let rate = if in_flight > self.collapse { 0.25e9 } else { 2.5e9 };
        self.seen.nanos.fetch_add((len as f64 / rate * 1e9) as u64, Ordering::Relaxed);
        self.seen.completed.fetch_add(1, Ordering::Relaxed);
        let error = || StoreError::new(StoreErrorKind::Io, std::path::Path::new("p"), "broken");
        Some(ReadCompletion { slot, tag, result: if self.broken == Some(shard) { Err(error()) } else { Ok(()) } })
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}

fn read(slot: Slot) -> ReadRequest {
    let tag = 1000 + slot.index() as u64;
    ReadRequest { shard: slot.index(), offset: 0, len: slot.len(), slot, tag }
}

fn reads(count: usize, bytes: usize) -> VecDeque<ReadRequest> {
    Arena::new(count, bytes).unwrap().1.into_iter().map(read).collect()
}

fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn bytes_in_flight_stay_within_the_window_and_all_reads_complete_in_order() {
    let (ssd, seen) = Ssd::new(usize::MAX);
    let mut reader = PacedReader::new(ssd).unwrap();
    let mut reads = reads(100, 3 * MB);
    let mut tags = vec![];
    while tags.len() < 100 {
        reader.submit(&mut reads);
        assert!(reader.in_flight() <= reader.capacity());
        tags.push(reader.wait().unwrap().tag);
    }
    assert_eq!(tags, (1000..1100).collect::<Vec<_>>());
    // A trial of a larger window adds a quarter.
    assert!(seen.bytes_max.load(Ordering::Relaxed) <= 30 * MB as u64, "{:?}", seen.bytes_max);
    assert!(reader.wait().is_none() && reader.poll().is_none());
}

#[test]
fn the_misses_of_a_token_start_within_the_call() {
    let (ssd, seen) = Ssd::new(usize::MAX);
    let mut reader = PacedReader::new(ssd).unwrap();
    reader.submit(&mut reads(6, 7 * MB / 2));
    assert_eq!(seen.started.load(Ordering::Relaxed), 6);
    // The thread has nothing to do, so the reads complete when the caller asks.
    thread::sleep(Duration::from_millis(20));
    assert_eq!(seen.completed.load(Ordering::Relaxed), 0);
    assert_eq!((0..6).filter_map(|_| reader.wait()).count(), 6);
}

#[test]
fn waiting_reads_start_while_the_caller_is_away() {
    let (ssd, seen) = Ssd::new(usize::MAX);
    let mut reader = PacedReader::new(ssd).unwrap();
    reader.submit(&mut reads(64, 3 * MB));
    wait_until(|| seen.started.load(Ordering::Relaxed) == 64);
    assert!(seen.bytes_max.load(Ordering::Relaxed) <= 30 * MB as u64);
    assert_eq!(reader.in_flight(), 64);
    assert_eq!((0..70).filter_map(|_| reader.wait()).count(), 64);
}

#[test]
fn a_read_larger_than_the_window_starts_alone() {
    let (ssd, seen) = Ssd::new(usize::MAX);
    let mut reader = PacedReader::new(ssd).unwrap();
    reader.submit(&mut reads(3, 40 * MB));
    assert_eq!((0..3).filter_map(|_| reader.wait()).count(), 3);
    assert_eq!(seen.bytes_max.load(Ordering::Relaxed), 40 * MB as u64);
}

#[test]
fn failed_reads_keep_their_tags_and_free_their_room() {
    let (mut ssd, _) = Ssd::new(usize::MAX);
    ssd.broken = Some(7);
    let mut reader = PacedReader::with_window(ssd, Drives::one(0), 4 * MB as u64);
    reader.submit(&mut reads(20, 3 * MB));
    for _ in 0..20 {
        let done = reader.wait().unwrap();
        assert_eq!((done.tag, done.result.is_err()), (1000 + done.slot.index() as u64, done.slot.index() == 7));
    }
    assert_eq!(reader.shared.state.lock().dispatcher.drives()[0].in_flight_bytes(), 0);
}

#[test]
fn the_window_leaves_a_depth_at_which_the_rate_collapses() {
    let (mut ssd, seen) = Ssd::new(10 * MB);
    // Slower than the caller, so that reads wait all the time.
    (ssd.capacity, ssd.real) = (512, Duration::from_micros(50));
    let time = seen.clone();
    let clock = move || Duration::from_nanos(time.nanos.load(Ordering::Relaxed));
    let mut reader = PacedReader::with(ssd, Drives::one(0), ReadWindow::new, Box::new(clock)).unwrap();
    let mut next = reads(512, 2 * MB);
    let mut run = |count: usize| {
        let before = seen.nanos.load(Ordering::Relaxed);
        for _ in 0..count {
            reader.submit(&mut next);
            next.push_back(read(reader.wait().unwrap().slot));
        }
        (count * 2 * MB) as f64 / (seen.nanos.load(Ordering::Relaxed) - before) as f64
    };
    run(1500);
    let rate = run(3000);
    assert!(rate > 2.0, "{rate} GB/s");
    assert!(reader.window_bytes() <= 12 * MB as u64, "{}", reader.window_bytes());
}

#[test]
fn dropping_returns_the_slots_of_waiting_and_completed_reads() {
    for returned in 0..4 {
        let (arena, slots) = Arena::new(60, 3 * MB).unwrap();
        let mut reader = PacedReader::new(Ssd::new(usize::MAX).0).unwrap();
        reader.submit(&mut slots.into_iter().map(read).collect());
        for _ in 0..returned {
            reader.wait().unwrap();
        }
        drop(reader);
        assert!(arena.has_no_slots());
    }
}
