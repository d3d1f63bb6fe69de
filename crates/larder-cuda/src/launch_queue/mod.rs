//! Collects launches of the compute stream, and submits them together.
//!
//! The host often knows many launches before it has to wait for the first of them. They are submitted when the host
//! waits for them or copies what they compute, goes on to something else (`flush`), or has asked for enough to keep the
//! device busy meanwhile. What they read from main memory is [staged](LaunchQueue::stage), and copied by one launch
//! before them. Launches that come again and again become a [graph](graphs).
#![allow(unsafe_code)]

mod graphs;
mod launch_list;
mod staged;

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Driver, EventHandle, GpuInfo, Launch, Stream};
use crate::error::{GpuError, Result};
use crate::launches::with_copy_launch;
use crate::memory::is_kernel_copy;
use graphs::Graphs;
use launch_list::LaunchList;
use staged::StagedBytes;

/// Launches that are submitted without waiting for more.
const MAX_PENDING: usize = 64;

/// A driver whose launches on the compute stream are collected. Everything on that stream goes through it.
pub struct LaunchQueue {
    inner: Arc<dyn Driver>,
    state: Mutex<State>,
}

struct State {
    pending: LaunchList,
    /// Bytes for the launches since the last wait, and for those before.
    staged: [Staged; 2],
    /// The last operation that may read the second of them.
    read_until: u64,
    /// Whether collected launches read bytes of which there is another number each time.
    varying: bool,
    /// Operations of the compute stream so far, those that are collected included.
    asked: u64,
    /// How many of them are known to be complete.
    reached: u64,
    /// The operations before each event that was last recorded on the compute stream.
    recorded: HashMap<usize, Recorded>,
    graphs: Graphs,
    /// A launch that could not be submitted. No other is until that was reported.
    failed: Option<GpuError>,
    /// How often that happened.
    failures: u64,
}

#[derive(Clone, Copy)]
struct Recorded {
    point: u64,
    /// Whether the device knows of it.
    submitted: bool,
}

impl LaunchQueue {
    /// Collects the launches of `inner`.
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        let state = State {
            pending: LaunchList::default(),
            staged: [(); 2].map(|()| Staged::default()),
            read_until: 0,
            varying: false,
            asked: 0,
            reached: 0,
            recorded: HashMap::new(),
            graphs: Graphs::default(),
            failed: None,
            failures: 0,
        };
        LaunchQueue { inner, state: Mutex::new(state) }
    }

    /// Copies bytes to the device before the next launch: `write` gets their address there, and where to write them.
    /// They are valid for the launches until the next wait.
    pub fn stage(&self, bytes: usize, write: impl FnOnce(u64, &mut [u8]) -> Result<()>) -> Result<u64> {
        let mut state = self.lock();
        let (at, here) = state.staged[0].steady.take(&self.inner, bytes)?;
        write(at, here)?;
        Ok(at)
    }

    /// As [`stage`](Self::stage), for lists of another length each time: they do not move what else is staged, so that
    /// launches that read only that can come again.
    pub fn stage_varying(&self, bytes: usize, write: impl FnOnce(u64, &mut [u8]) -> Result<()>) -> Result<u64> {
        let mut state = self.lock();
        state.varying = true;
        let (at, here) = state.staged[0].varying.take(&self.inner, bytes)?;
        write(at, here)?;
        Ok(at)
    }

    /// What follows does not read bytes that vary: it is submitted apart from what does, and may become a graph.
    pub fn end_varying(&self) -> Result<()> {
        let mut state = self.lock();
        if state.varying { state.submit(&self.inner) } else { Ok(()) }
    }

    /// The number of the last operation of the compute stream.
    pub fn asked(&self) -> u64 {
        self.lock().asked
    }

    /// Takes the last launch back, if it has this number and was not submitted.
    pub fn take_back(&self, number: u64) -> bool {
        let mut state = self.lock();
        let taken = state.asked == number && state.pending.pop();
        state.asked -= u64::from(taken);
        taken
    }

    /// How many submissions have failed so far: what they were to write is not there.
    pub fn failures(&self) -> u64 {
        self.lock().failures
    }

    /// Allocates memory to stage `bytes` bytes that vary.
    pub fn reserve(&self, bytes: usize) -> Result<()> {
        self.lock().staged.iter_mut().try_for_each(|staged| staged.varying.reserve(&self.inner, bytes))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Bytes that are staged between two waits.
#[derive(Default)]
struct Staged {
    steady: StagedBytes,
    varying: StagedBytes,
}

impl Staged {
    fn both(&mut self) -> [&mut StagedBytes; 2] {
        [&mut self.steady, &mut self.varying]
    }

    fn has_unsent(&self) -> bool {
        self.steady.has_unsent() || self.varying.has_unsent()
    }
}

impl State {
    /// Submits all collected launches, behind a copy of the bytes that are staged for them.
    fn submit(&mut self, inner: &Arc<dyn Driver>) -> Result<()> {
        let varying = std::mem::take(&mut self.varying);
        if let Some(failed) = &self.failed {
            // What they were to write is not there either.
            self.failures += u64::from(!self.pending.is_empty());
            self.pending.clear();
            return Err(failed.clone());
        }
        if self.pending.is_empty() && !self.staged[0].has_unsent() {
            return Ok(());
        }
        let submitted = self.submit_pending(varying, inner);
        self.pending.clear();
        self.failures += u64::from(submitted.is_err());
        self.failed = submitted.clone().err();
        submitted
    }

    fn submit_pending(&mut self, varying: bool, inner: &Arc<dyn Driver>) -> Result<()> {
        let mut list = LaunchList::default();
        for (from, to, bytes) in self.staged[0].both().into_iter().flat_map(StagedBytes::take_copies) {
            match is_kernel_copy(to, bytes) {
                true => with_copy_launch(from, to, bytes as u64, |copy| list.push(copy)),
                // SAFETY: both have these bytes, which are written again only when the copy is complete.
                false => unsafe { inner.copy_in(Stream::Compute, from as *const u8, to, bytes)? },
            }
        }
        list.append(&self.pending);
        // SAFETY: the callers of `launch` guaranteed it; memory is freed only when they were submitted.
        unsafe {
            // Launches that read what varies hardly come again.
            let graph = if varying { None } else { self.graphs.find(&list, inner) };
            match graph {
                Some(graph) => inner.launch_graph(graph),
                None => list.iter().try_for_each(|launch| inner.launch(Stream::Compute, &launch)),
            }
        }
    }

    /// Whether an event of the compute stream is known to be complete. If not, the device knows of the event
    /// afterwards.
    fn is_reached(&mut self, event: EventHandle, inner: &Arc<dyn Driver>) -> Result<bool> {
        let Some(Recorded { point, submitted }) = self.recorded.get(&event.0).copied() else { return Ok(false) };
        if point <= self.reached {
            return Ok(true);
        }
        if !submitted {
            self.submit(inner)?;
            inner.record(event, Stream::Compute)?;
            self.recorded.insert(event.0, Recorded { point: self.asked, submitted: true });
        }
        Ok(false)
    }

    /// Everything before an event is complete.
    fn reach(&mut self, event: EventHandle) {
        let Some(Recorded { point, .. }) = self.recorded.get(&event.0) else { return };
        self.reached = self.reached.max(*point);
        if self.read_until <= self.reached && !self.staged[0].has_unsent() {
            self.staged.swap(0, 1);
            self.staged[0].both().into_iter().for_each(StagedBytes::begin);
            self.read_until = self.asked;
        }
    }
}

impl Drop for LaunchQueue {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        state.graphs.clear(&self.inner);
    }
}

impl Driver for LaunchQueue {
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
        self.inner.allocate(bytes)
    }

    unsafe fn free(&self, at: u64) {
        // An error is reported by the next wait.
        let _ = self.flush();
        // SAFETY: as the caller guarantees, now that all launches are submitted.
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
        let mut state = self.lock();
        if stream != Stream::Compute {
            state.recorded.remove(&event.0);
            return self.inner.record(event, stream);
        }
        state.asked += 1;
        state.submit(&self.inner)?;
        self.inner.record(event, stream)?;
        let point = state.asked;
        state.recorded.insert(event.0, Recorded { point, submitted: true });
        Ok(())
    }

    fn mark(&self, event: EventHandle, stream: Stream) -> Result<()> {
        if stream != Stream::Compute {
            return self.record(event, stream);
        }
        let mut state = self.lock();
        state.asked += 1;
        let point = state.asked;
        state.recorded.insert(event.0, Recorded { point, submitted: false });
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.lock().submit(&self.inner)
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        let mut state = self.lock();
        if stream == Stream::Compute {
            state.submit(&self.inner)?;
        }
        if state.is_reached(event, &self.inner)? { Ok(()) } else { self.inner.wait_event(stream, event) }
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        let mut state = self.lock();
        Ok(state.is_reached(event, &self.inner)? || self.inner.is_complete(event)?)
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        let mut state = self.lock();
        match state.is_reached(event, &self.inner) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(e) => {
                state.failed = None;
                return Err(e);
            }
        }
        self.inner.synchronise(event)?;
        state.reach(event);
        Ok(())
    }

    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration> {
        self.inner.elapsed(from, to)
    }

    fn drain(&self) {
        // An error is reported by the next wait.
        let _ = self.flush();
        self.inner.drain();
    }

    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        if stream == Stream::Compute {
            state.asked += 1;
            state.submit(&self.inner)?;
        }
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.copy_in(stream, from, to, bytes) }
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        if stream == Stream::Compute {
            state.asked += 1;
            state.submit(&self.inner)?;
        }
        // SAFETY: the caller's guarantees are those of this method.
        unsafe { self.inner.copy_out(stream, from, to, bytes) }
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        let mut state = self.lock();
        if stream != Stream::Compute {
            // SAFETY: the caller's guarantees are those of this method.
            return unsafe { self.inner.launch(stream, launch) };
        }
        // The last launch is kept, as it may be taken back.
        if state.pending.len() == MAX_PENDING {
            state.submit(&self.inner)?;
        }
        state.asked += 1;
        state.pending.push(launch);
        Ok(())
    }
}
