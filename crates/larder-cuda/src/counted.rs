//! A driver that counts what another is asked for, and how often the host had to wait.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use larder_cache::two_tiers::DeviceWork;
use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Argument, Driver, EventHandle, GpuInfo, GraphHandle, Launch, Stream};
use crate::error::Result;
use crate::launches::COPY_KERNEL;

/// A driver with counts of its work, which depend on the calls alone and not on the device's speed.
pub struct CountedDriver {
    inner: Arc<dyn Driver>,
    progress: Mutex<Progress>,
}

/// Points in the streams are numbered by the operations submitted before them.
#[derive(Default)]
struct Progress {
    work: DeviceWork,
    submitted: [u64; Stream::ALL.len()],
    /// By stream: the point up to which waits have shown that everything is complete.
    reached: [u64; Stream::ALL.len()],
    /// The last recording of each event.
    recorded: HashMap<usize, (Stream, u64)>,
    /// Launches of each graph, and the bytes that they exchange.
    graphs: HashMap<usize, (u64, u64)>,
    /// Bytes of device memory by address.
    allocated: HashMap<u64, u64>,
    allocated_bytes: u64,
    peak_bytes: u64,
}

impl Progress {
    fn submit(&mut self, stream: Stream) {
        self.submitted[stream as usize] += 1;
    }

    fn record(&mut self, event: EventHandle, stream: Stream) {
        self.submit(stream);
        self.recorded.insert(event.0, (stream, self.submitted[stream as usize]));
    }

    /// Counts a wait for kernels, unless an earlier wait was for a later point of their stream.
    fn wait(&mut self, event: EventHandle) {
        let Some(&(stream, point)) = self.recorded.get(&event.0) else { return };
        let reached = &mut self.reached[stream as usize];
        self.work.waits += u64::from(stream == Stream::Compute && point > *reached);
        *reached = point.max(*reached);
    }
}

impl CountedDriver {
    /// Counts the work of `inner` from now on.
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        CountedDriver { inner, progress: Mutex::default() }
    }

    /// The most bytes of device memory that were allocated at one time.
    pub fn peak_bytes(&self) -> u64 {
        self.lock().peak_bytes
    }

    /// The work so far.
    pub fn work(&self) -> DeviceWork {
        self.lock().work
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock()
    }

    fn count_copy(&self, stream: Stream, bytes: usize) {
        let mut progress = self.lock();
        progress.submit(stream);
        if stream == Stream::Compute {
            progress.work.exchanged_bytes += bytes as u64;
        }
    }
}

impl Driver for CountedDriver {
    fn info(&self) -> Result<GpuInfo> {
        self.inner.info()
    }

    fn warm_up(&self) -> Duration {
        self.inner.warm_up()
    }

    fn probe_bytes(&self) -> u64 {
        self.inner.probe_bytes()
    }

    fn has_tensor_cores(&self) -> bool {
        self.inner.has_tensor_cores()
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        let at = self.inner.allocate(bytes)?;
        let mut progress = self.lock();
        progress.allocated.insert(at, bytes);
        progress.allocated_bytes += bytes;
        progress.peak_bytes = progress.peak_bytes.max(progress.allocated_bytes);
        Ok(at)
    }

    unsafe fn free(&self, at: u64) {
        let mut progress = self.lock();
        progress.allocated_bytes -= progress.allocated.remove(&at).unwrap_or_default();
        drop(progress);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.free(at) }
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.inner.allocate_host(bytes)
    }

    unsafe fn free_host(&self, at: NonNull<u8>) {
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.free_host(at) }
    }

    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.register(from, bytes) }
    }

    unsafe fn unregister(&self, from: *const u8) {
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.unregister(from) }
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.inner.create_event()
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        self.lock().recorded.remove(&event.0);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.destroy_event(event) }
    }

    fn record(&self, event: EventHandle, stream: Stream) -> Result<()> {
        self.lock().record(event, stream);
        self.inner.record(event, stream)
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        self.lock().submit(stream);
        self.inner.wait_event(stream, event)
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        self.inner.is_complete(event)
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        self.lock().wait(event);
        self.inner.synchronise(event)
    }

    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }

    fn drain(&self) {
        self.inner.drain();
    }

    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        self.count_copy(stream, bytes);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.copy_in(stream, from, to, bytes) }
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        self.count_copy(stream, bytes);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.copy_out(stream, from, to, bytes) }
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        let mut progress = self.lock();
        progress.submit(stream);
        progress.work.launches += 1;
        progress.work.exchanged_bytes += exchanged(launch);
        drop(progress);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.launch(stream, launch) }
    }

    unsafe fn create_graph(&self, launches: &[Launch]) -> Result<Option<GraphHandle>> {
        // SAFETY: the caller's guarantees are those of this method.
        let made = unsafe { self.inner.create_graph(launches) };
        let graph = made.inspect_err(|_| self.lock().work.failed_graphs += 1)?;
        let work = (launches.len() as u64, launches.iter().map(exchanged).sum());
        self.lock().graphs.extend(graph.map(|graph| (graph.0, work)));
        Ok(graph)
    }

    unsafe fn launch_graph(&self, graph: GraphHandle) -> Result<()> {
        let mut progress = self.lock();
        progress.submit(Stream::Compute);
        let (launches, bytes) = progress.graphs[&graph.0];
        progress.work.graphs += 1;
        progress.work.graph_launches += launches;
        progress.work.exchanged_bytes += bytes;
        drop(progress);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.launch_graph(graph) }
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        self.lock().graphs.remove(&graph.0);
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.destroy_graph(graph) }
    }
}

/// Bytes that a launch copies between main memory and the device.
fn exchanged(launch: &Launch) -> u64 {
    match (launch.kernel, launch.arguments) {
        (COPY_KERNEL, [.., Argument::Bytes(bytes)]) => *bytes,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_what_is_known_to_be_complete_is_not_counted() {
        let (early, late, other) = (EventHandle(0), EventHandle(1), EventHandle(2));
        let mut progress = Progress::default();
        progress.wait(early);
        assert_eq!(progress.work.waits, 0, "never recorded");
        progress.record(early, Stream::Compute);
        progress.record(late, Stream::Compute);
        progress.record(other, Stream::CopyIn);
        progress.wait(late);
        progress.wait(early);
        progress.wait(late);
        assert_eq!(progress.work.waits, 1);
        progress.wait(other);
        assert_eq!(progress.work.waits, 1, "for a copy of an expert");
        progress.record(early, Stream::Compute);
        progress.wait(early);
        assert_eq!(progress.work.waits, 2, "recorded again");
    }
}
