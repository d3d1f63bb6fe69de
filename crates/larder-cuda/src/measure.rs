//! Measures the speed of a GPU and of the link to it, in well under a second.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use larder_cache::two_tiers::MeasuredCosts;
use larder_core::ExpertLayout;
use larder_model::Activation;

use crate::driver::{Driver, Stream};
use crate::error::Result;
use crate::expert_kernels::{BLOCK_BYTES, DeviceActivations, ExpertBatch, ExpertKernels};
use crate::launch_queue::LaunchQueue;
use crate::launches::Launches;
use crate::memory::{DeviceBuffer, PinnedBuffer, StreamEvent};

/// The fastest of the last runs counts; this is their number.
const LAST: usize = 5;
/// The most runs, for work that takes very little time.
const MAX_RUNS: usize = 4000;
/// The part (1/n) of the warm-up work that is repeated for each rate but the first, which may depend on other clocks.
const PART_OF_WARM_UP: u32 = 3;
/// Bytes of the longest copy.
const MAX_COPY_BYTES: usize = 64 << 20;
/// The most blocks of the kernel that reads device memory, and the bytes that each reads at least.
const READERS: u32 = 2048;
const READER_BYTES: u64 = 4096;
/// The part (1/n) of the free memory that is used during the measurement.
const PART_OF_FREE: u64 = 8;

/// Measured costs, in seconds per byte.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rates {
    /// Copying from page-locked memory to the device.
    pub copy_in: f64,
    /// Copying from the device to page-locked memory.
    pub copy_out: f64,
    /// Reading device memory.
    pub read: f64,
    /// Computing experts for one token, several at a time.
    pub compute: f64,
}

impl Rates {
    /// The initial costs of a tiered cache; `host` is the seconds per byte that the CPU takes to compute an expert.
    pub fn measured(&self, host: f64) -> MeasuredCosts {
        MeasuredCosts { copy: self.copy_in, host, device: self.compute }
    }
}

/// Whether the driver locks some pages of memory that it has not allocated itself.
pub fn can_lock_pages(driver: &Arc<dyn Driver>) -> bool {
    const PAGE: usize = 64 * 1024;
    let memory = vec![0_u8; 2 * PAGE];
    let at = memory.as_ptr().wrapping_add(memory.as_ptr().align_offset(PAGE));
    // SAFETY: the page is within the memory, which nothing else uses, and is unregistered before it is freed.
    unsafe {
        let locked = driver.register(at, PAGE).is_ok();
        if locked {
            driver.unregister(at);
        }
        locked
    }
}

/// Measures all rates; copying and computing with experts of this layout, computing with `experts` experts at a time.
pub fn measure(queue: &Arc<LaunchQueue>, layout: &ExpertLayout, act: Activation, experts: usize) -> Result<Rates> {
    let driver: &Arc<dyn Driver> = &(queue.clone() as _);
    let budget = driver.info()?.free_bytes / PART_OF_FREE;
    let mut timer = Timer { begin: StreamEvent::new(driver)?, end: StreamEvent::new(driver)?, least: driver.warm_up() };
    let (copy_in, copy_out) = copies(driver, &mut timer, layout.bytes.min(MAX_COPY_BYTES).min(budget as usize))?;
    let read = read(driver, &timer, driver.probe_bytes().min(budget))?;
    let compute = compute(queue, &timer, layout, act, experts.clamp(1, (budget as usize / layout.bytes).max(1)))?;
    Ok(Rates { copy_in, copy_out, read, compute })
}

/// Seconds per byte to and from the device.
fn copies(driver: &Arc<dyn Driver>, timer: &mut Timer, bytes: usize) -> Result<(f64, f64)> {
    let (there, mut here) = (DeviceBuffer::of(driver, bytes)?, PinnedBuffer::of(driver, bytes)?);
    // SAFETY: both buffers have `bytes` bytes, and the copy is waited for below.
    let copy_in = || unsafe { driver.copy_in(Stream::CopyIn, here.as_ptr(), there.at(), bytes) };
    let into = timer.per_byte(bytes, Stream::CopyIn, copy_in);
    timer.least /= PART_OF_WARM_UP;
    // SAFETY: as above.
    let copy_out = || unsafe { driver.copy_out(Stream::CopyOut, there.at(), here.as_mut_ptr(), bytes) };
    let out_of = timer.per_byte(bytes, Stream::CopyOut, copy_out);
    // After an error a copy may be in flight.
    driver.drain();
    Ok((into?, out_of?))
}

fn read(driver: &Arc<dyn Driver>, timer: &Timer, bytes: u64) -> Result<f64> {
    let (buffer, out) = (DeviceBuffer::of(driver, bytes as usize)?, DeviceBuffer::of(driver, 4 * READERS as usize)?);
    let launches = Launches::new(driver);
    let readers = (bytes / READER_BYTES).clamp(1, READERS.into()) as u32;
    let read = || launches.read_all(buffer.at(), bytes, out.at(), readers);
    timer.per_byte(bytes as usize, Stream::Compute, read)
}

fn compute(queue: &Arc<LaunchQueue>, timer: &Timer, layout: &ExpertLayout, act: Activation, n: usize) -> Result<f64> {
    let driver: &Arc<dyn Driver> = &(queue.clone() as _);
    let hidden = layout.up.cols;
    let data = DeviceBuffer::of(driver, n * layout.bytes)?;
    let x = DeviceBuffer::of(driver, 4 * hidden + hidden * BLOCK_BYTES)?;
    let out = DeviceBuffer::of(driver, 4 * n * hidden)?;
    let mut kernels = ExpertKernels::new(queue);
    kernels.reserve(layout, n)?;
    let experts: Vec<(u64, usize)> = (0..n).map(|i| (data.at() + (i * layout.bytes) as u64, 1)).collect();
    let x = DeviceActivations { values: x.at(), blocks: x.at() };
    let group = ExpertBatch { layout, act, experts: &experts, picks: &vec![0; n], x, out: out.at() };
    timer.per_byte(n * layout.bytes, Stream::Compute, || {
        kernels.send(&group)?;
        kernels.compute(&group)
    })
}

struct Timer {
    begin: StreamEvent,
    end: StreamEvent,
    /// Least total time of the runs.
    least: Duration,
}

impl Timer {
    /// Seconds per byte in the fastest of the last runs: the first runs find the clocks of an idle device down.
    fn per_byte(&self, bytes: usize, stream: Stream, mut ask: impl FnMut() -> Result<()>) -> Result<f64> {
        let (mut last, mut all) = ([Duration::MAX; LAST], Duration::ZERO);
        for run in 0..MAX_RUNS {
            self.begin.record(stream)?;
            ask()?;
            self.end.record(stream)?;
            self.end.synchronise()?;
            let took = self.end.since(&self.begin)?;
            last[run % LAST] = took;
            all += took;
            if run + 1 >= LAST && all >= self.least {
                break;
            }
        }
        let fastest = last.into_iter().min().unwrap_or_default();
        Ok(fastest.as_secs_f64() / bytes.max(1) as f64)
    }
}
