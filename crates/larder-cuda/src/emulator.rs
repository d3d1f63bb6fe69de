//! The double for tests: a GPU made of this machine's memory and of kernels compiled for its processor.
//!
//! Nothing happens when it is asked for. It happens when somebody waits, or now and then between, in an order among the
//! streams that the seed decides and events allow: whoever forgets to wait for something gets wrong bytes for some seed.
#![allow(unsafe_code)]

mod library;
mod streams;

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::driver::{Driver, EventHandle, GpuInfo, Launch, Stream};
use crate::error::{GpuError, Result};
use library::Kernels;
use streams::{QueuedOp, State, StreamOp};

/// What can be made to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmulatorFault {
    /// Copies to the device.
    CopyIn,
    /// Copies from the device.
    CopyOut,
    /// Kernels.
    Launch,
    /// Taking memory of the device.
    Allocate,
}

/// A GPU that is none. The same seed and the same calls give the same.
pub struct Emulator {
    state: Mutex<State>,
    kernels: &'static Kernels,
    total_bytes: u64,
    min_matrix_bytes: usize,
}

impl Emulator {
    /// With so much memory; nothing fails. It is an error if there is no C++ compiler.
    pub fn new(total_bytes: u64, seed: u64) -> Result<Self> {
        let kernels = library::kernels()?;
        Ok(Emulator { state: Mutex::new(State::new(seed)), kernels, total_bytes, min_matrix_bytes: 0 })
    }

    /// One in so many of these fails, by chance: at once, or while it runs.
    pub fn with_fault(self, fault: EmulatorFault, one_in: u64) -> Self {
        self.lock().failing[fault as usize] = one_in;
        self
    }

    /// Slots cannot be page-locked where they are.
    pub fn without_page_locking(self) -> Self {
        self.lock().refuses_to_register = true;
        self
    }

    /// Streams do not wait for each other, as if nobody had asked them to.
    pub fn ignoring_events(self) -> Self {
        self.lock().ignores_events = true;
        self
    }

    /// How long copies and launches are said to take.
    pub fn with_times(self, latency: Duration, bytes_per_s: f64, launch: Duration) -> Self {
        self.lock().set_times(latency, bytes_per_s, launch);
        self
    }

    /// Smaller matrices are not worth the way; else all are.
    pub fn with_min_matrix_bytes(self, min_matrix_bytes: usize) -> Self {
        Emulator { min_matrix_bytes, ..self }
    }

    /// It is slow at first: until half of this time it was busy.
    pub fn with_warm_up(self, time: Duration) -> Self {
        self.lock().waking = time;
        self
    }

    /// How many copies, launches and events were asked for that have not happened.
    pub fn pending_ops(&self) -> usize {
        self.lock().pending_ops()
    }

    /// How many launches there were so far.
    pub fn launches(&self) -> u64 {
        self.lock().launches
    }

    /// Bytes of its memory that are taken, and bytes here that are page-locked.
    pub fn allocated_bytes(&self) -> (u64, u64) {
        let state = self.lock();
        (state.device.bytes(), state.host.bytes() + state.registered.values().sum::<usize>() as u64)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, stream: Stream, act: StreamOp, fault: Option<EmulatorFault>) -> Result<()> {
        let mut state = self.lock();
        let fails = fault.is_some_and(|fault| state.fails(fault));
        if fails && state.below(2) == 0 {
            return Err(GpuError::failed(act.name(), "the emulator was told to fail"));
        }
        state.ask(stream, QueuedOp { act, fails });
        // Meanwhile the device works, or does not.
        while state.below(3) == 0 && state.step(self.kernels) {}
        Ok(())
    }
}

impl Driver for Emulator {
    fn info(&self) -> Result<GpuInfo> {
        let free_bytes = self.total_bytes - self.lock().device.bytes();
        Ok(GpuInfo { name: "emulator".into(), capability: (0, 0), free_bytes, total_bytes: self.total_bytes })
    }

    fn warm_up(&self) -> Duration {
        self.lock().waking
    }

    fn min_matrix_bytes(&self) -> usize {
        self.min_matrix_bytes
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut state = self.lock();
        let free_bytes = self.total_bytes - state.device.bytes();
        if bytes > free_bytes || state.fails(EmulatorFault::Allocate) {
            return Err(GpuError::OutOfMemory { bytes, free_bytes });
        }
        Ok(state.device.allocate(bytes as usize, 0xA5) as u64)
    }

    unsafe fn free(&self, at: u64) {
        self.drain();
        self.lock().device.free(at as usize);
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>> {
        let at = self.lock().host.allocate(bytes, 0);
        NonNull::new(at as *mut u8).ok_or_else(|| GpuError::failed("taking page-locked memory", "there is none"))
    }

    unsafe fn free_host(&self, at: NonNull<u8>) {
        let (mut state, at) = (self.lock(), at.as_ptr() as usize);
        assert!(!state.is_used(at, state.host.len_of(at)), "memory was given back that a copy is yet to use");
        state.host.free(at);
    }

    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        if state.refuses_to_register {
            return Err(GpuError::failed("page-locking memory", "the emulator was told to refuse"));
        }
        state.registered.insert(from as usize, bytes);
        Ok(())
    }

    unsafe fn unregister(&self, from: *const u8) {
        let (mut state, from) = (self.lock(), from as usize);
        let bytes = state.registered.remove(&from).expect("it was registered");
        assert!(!state.is_used(from, bytes), "memory was let go of that a copy is yet to use");
    }

    fn create_event(&self) -> Result<EventHandle> {
        Ok(EventHandle(self.lock().create_event()))
    }

    unsafe fn destroy_event(&self, _: EventHandle) {}

    fn record(&self, event: EventHandle, stream: Stream) -> Result<()> {
        let recording = self.lock().recording(event.0);
        self.ask(stream, StreamOp::Record(event.0, recording), None)
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        let recorded = self.lock().recorded(event.0);
        self.ask(stream, StreamOp::WaitEvent(event.0, recorded), None)
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        let mut state = self.lock();
        state.step(self.kernels);
        if state.is_complete(event.0) { state.result(event.0).map(|()| true) } else { Ok(false) }
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        let mut state = self.lock();
        while !state.is_complete(event.0) {
            assert!(state.step(self.kernels), "streams wait for each other in a circle");
        }
        state.result(event.0)
    }

    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration> {
        Ok(self.lock().elapsed(from.0, to.0))
    }

    fn drain(&self) {
        let mut state = self.lock();
        while state.step(self.kernels) {}
    }

    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()> {
        let from = from as usize;
        self.lock().check_copy(from, to as usize, bytes)?;
        self.ask(stream, StreamOp::Copy { from, to: to as usize, bytes }, Some(EmulatorFault::CopyIn))
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        let to = to as usize;
        self.lock().check_copy(to, from as usize, bytes)?;
        self.ask(stream, StreamOp::Copy { from: from as usize, to, bytes }, Some(EmulatorFault::CopyOut))
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        let Launch { kernel, grid, block, arguments } = *launch;
        let mut state = self.lock();
        state.check_launch(kernel, arguments)?;
        state.launches += 1;
        drop(state);
        self.ask(
            stream,
            StreamOp::Launch { kernel, grid, block, arguments: arguments.to_vec() },
            Some(EmulatorFault::Launch),
        )
    }
}
