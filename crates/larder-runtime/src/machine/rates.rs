//! Measures how fast memory and SSD can be read, in the way in which the engine reads them, and how fast the system
//! clears memory.

use std::collections::VecDeque;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use larder_core::SHARD_ALIGN;
use larder_kernels::ThreadPool;
use larder_store::reader::{Arena, ReadRequest, Reader, ReaderSpec, ShardFiles, Slot};
use larder_store::{DATA_START, Division, Store};

use larder_os::memory;

/// Time limit of a probe.
const PROBE_TIME: Duration = Duration::from_millis(1500);
/// Bytes that are touched to measure how fast memory is cleared, and those of a slot of them.
const CLEARED_BYTES: usize = 256 << 20;
const CLEARED_SLOT_BYTES: usize = 4 << 20;
/// Reads in flight: enough to keep an SSD busy at the size of an expert.
const IN_FLIGHT: usize = 8;

/// Bytes per second that `threads` threads together read from memory at most.
pub fn memory_bandwidth(threads: usize) -> Result<f64> {
    let pool = ThreadPool::new(threads, false).context("no threads for the measurement of memory")?;
    Ok(larder_kernels::memory_bandwidth(&pool))
}

/// Bytes per second at which the system provides and clears memory like that of slots, when it is first touched.
pub fn clearing_rate() -> Result<f64> {
    let most = memory::available().map_or(CLEARED_BYTES, |bytes| CLEARED_BYTES.min((bytes / 8) as usize));
    let count = (most / CLEARED_SLOT_BYTES).max(1);
    let (_arena, mut slots) =
        Arena::new(count, CLEARED_SLOT_BYTES).context("not enough memory for the slots of the measurement")?;
    let start = Instant::now();
    slots.iter_mut().for_each(|slot| slot.iter_mut().step_by(SHARD_ALIGN).for_each(|byte| *byte = 1));
    black_box(&slots);
    Ok((count * CLEARED_SLOT_BYTES) as f64 / start.elapsed().as_secs_f64())
}

/// Bytes per second of reading experts from all over a store.
pub struct SsdThroughput {
    /// Of all drives together, as the experts are divided between them.
    pub rate: f64,
    /// Of each drive alone.
    pub drives: Vec<f64>,
    /// The reader as text.
    pub how: String,
}

/// Measures the throughput of the drives of a store, one after the other.
pub fn ssd_throughput(store: &Arc<Store>, reader: &ReaderSpec) -> Result<SsdThroughput> {
    let (mut drives, mut how) = (Vec::new(), String::new());
    for drive in 0..store.drive_folders().len() {
        let pattern = ReadPattern::of_drive(store, drive)?;
        let (rate, text) = pattern.throughput(reader, IN_FLIGHT, PROBE_TIME, pattern.locations.len())?;
        drives.push(rate);
        how = text;
    }
    let striped = store.second_folder().is_some_and(|second| second.division == Division::Stripe);
    let slowest = drives.iter().copied().fold(f64::INFINITY, f64::min);
    // Each drive of a stripe has half of the experts, so the slower one decides.
    let rate = if striped { slowest * drives.len() as f64 } else { drives.iter().sum() };
    Ok(SsdThroughput { rate, drives, how })
}

/// A rate with the window that gave it.
#[derive(Clone, Copy, Debug)]
pub struct PacedRate {
    /// Bytes per second.
    pub rate: f64,
    /// Bytes that the window allows in flight.
    pub window_bytes: u64,
}

/// Reads of one length, from files of one length.
pub struct ReadPattern {
    /// The files to read.
    pub files: Arc<ShardFiles>,
    /// Bytes per read.
    pub len: usize,
    /// Index of the file, and offset in bytes.
    locations: Vec<(usize, u64)>,
}

impl ReadPattern {
    /// One read for every expert of a store that lies on its first drive, as long as the smallest expert.
    pub fn of_store(store: &Arc<Store>) -> Result<Self> {
        Self::of_drive(store, 0)
    }

    /// The same for one of the store's drives.
    pub fn of_drive(store: &Arc<Store>, drive: usize) -> Result<Self> {
        let files = Arc::new(store.shard_files()?);
        let locations = files.drives().files_on(drive).map(|file| (file, DATA_START as u64)).collect();
        Ok(ReadPattern { files, len: store.manifest().experts.smallest_bytes(), locations })
    }

    /// One file, in reads of `len` bytes.
    pub fn of_file(path: PathBuf, bytes: u64, len: usize) -> Result<Self> {
        let locations = (0..bytes / len as u64).map(|i| (0, i * len as u64)).collect();
        Ok(ReadPattern { files: Arc::new(ShardFiles::new(1, move |_| (path.clone(), bytes))?), len, locations })
    }

    /// Bytes per second of at most `count` reads, `depth` of them in flight whatever the SSD likes; no read is started
    /// after `time_limit`. Also returns the reader as text.
    pub fn throughput(
        &self,
        reader: &ReaderSpec,
        depth: usize,
        time_limit: Duration,
        count: usize,
    ) -> Result<(f64, String)> {
        let (arena, slots) = self.touched_slots(depth)?;
        let (mut reader, how) = reader.open_unpaced(&self.files, &arena)?;
        Ok((self.read(&mut *reader, slots, time_limit, count)?, how))
    }

    /// What the window of the engine's reader makes of `queued` reads at a time within `time_limit`.
    pub fn paced(&self, reader: &ReaderSpec, queued: usize, time_limit: Duration) -> Result<PacedRate> {
        let (arena, slots) = self.touched_slots(queued)?;
        let (mut reader, _) = reader.open_paced(&self.files, &arena)?;
        let rate = self.read(&mut reader, slots, time_limit, usize::MAX)?;
        Ok(PacedRate { rate, window_bytes: reader.window_bytes() })
    }

    /// Slots whose memory is there already, so that its clearing is not measured.
    fn touched_slots(&self, count: usize) -> Result<(Arena, Vec<Slot>)> {
        let (arena, slots) =
            Arena::new(count, self.len).context("not enough memory for the slots of the measurement")?;
        // Where the system cannot, the first reads do it.
        let _ = arena.touch();
        Ok((arena, slots))
    }

    /// Bytes per second of at most `count` reads into `slots`.
    fn read(&self, reader: &mut dyn Reader, slots: Vec<Slot>, time_limit: Duration, count: usize) -> Result<f64> {
        let mut next = self.scattered().take(count);
        let mut request =
            |slot| next.next().map(|(shard, offset)| ReadRequest { shard, offset, len: self.len, slot, tag: 0 });
        let mut waiting: VecDeque<ReadRequest> = slots.into_iter().filter_map(&mut request).collect();
        let (start, mut done) = (Instant::now(), 0u64);
        loop {
            reader.submit(&mut waiting);
            let Some(read) = reader.wait() else { break };
            read.result?;
            done += self.len as u64;
            if start.elapsed() < time_limit {
                waiting.extend(request(read.slot));
            }
        }
        Ok(done as f64 / start.elapsed().as_secs_f64())
    }

    /// All locations, far from each other, over and over. A stride that is coprime to the count visits each of them
    /// before any one twice.
    fn scattered(&self) -> impl Iterator<Item = (usize, u64)> {
        let count = self.locations.len();
        let stride = (count * 5 / 8).max(1);
        let stride = (stride..).find(|s| gcd(*s, count) == 1).unwrap_or(1);
        (0..usize::MAX).map(move |i| self.locations[i.wrapping_mul(stride) % count])
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
