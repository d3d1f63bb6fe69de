//! The fake for tests: a GPU emulated in main memory, with the kernels compiled for the CPU.
//!
//! Submitted work is not executed at once. It is executed when a caller waits, or now and then in between, in an order
//! among the streams that the seed decides and events allow: a caller that forgets to wait gets wrong bytes for some
//! seed.
#![allow(unsafe_code)]

mod library;
mod streams;

use std::ptr::NonNull;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Driver, EventHandle, GpuInfo, GraphHandle, Launch, Stream};
use crate::error::{GpuError, Result};
use library::Kernels;
use streams::{GraphLaunch, QueuedOp, State, StreamOp};

/// An operation that can be made to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmulatorFault {
    /// Copies to the device.
    CopyIn,
    /// Copies from the device.
    CopyOut,
    /// Kernel launches.
    Launch,
    /// Allocations of device memory.
    Allocate,
}

/// An emulated GPU. The same seed and the same calls give the same results and the same failures.
pub struct Emulator {
    state: Mutex<State>,
    kernels: &'static Kernels,
    total_bytes: u64,
    has_tensor_cores: bool,
}

impl Emulator {
    /// An emulated GPU with `total_bytes` of memory, without faults. Fails if there is no C++ compiler.
    pub fn new(total_bytes: u64, seed: u64) -> Result<Self> {
        let kernels = library::kernels()?;
        let state = Mutex::new(State::new(seed));
        Ok(Emulator { state, kernels, total_bytes, has_tensor_cores: true })
    }

    /// Makes one in `one_in` of these operations fail at random: when it is submitted, or while it runs.
    pub fn with_fault(self, fault: EmulatorFault, one_in: u64) -> Self {
        self.lock().failing[fault as usize] = one_in;
        self
    }

    /// Computes products of many tokens without tensor cores, as older devices do.
    pub fn without_tensor_cores(self) -> Self {
        Emulator { has_tensor_cores: false, ..self }
    }

    /// Refuses to page-lock existing memory.
    pub fn without_page_locking(self) -> Self {
        self.lock().refuses_to_register = true;
        self
    }

    /// Makes streams ignore the events that they should wait for.
    pub fn ignoring_events(self) -> Self {
        Stream::ALL.into_iter().fold(self, |emulator, stream| {
            Stream::ALL.into_iter().fold(emulator, |emulator, other| emulator.ignoring_waits(stream, other))
        })
    }

    /// Makes a stream ignore events of another that it should wait for.
    pub fn ignoring_waits(self, waiting: Stream, other: Stream) -> Self {
        self.lock().ignored_waits.push((waiting, other));
        self
    }

    /// Sets the emulated times of copies (latency and bandwidth) and launches.
    pub fn with_times(self, latency: Duration, bytes_per_s: f64, launch: Duration) -> Self {
        self.lock().set_times(latency, bytes_per_s, launch);
        self
    }

    /// Makes it slow until it has worked for half of this time.
    pub fn with_warm_up(self, time: Duration) -> Self {
        self.lock().warm_up = time;
        self
    }

    /// Number of copies, launches and event operations that were submitted and not executed.
    pub fn pending_ops(&self) -> usize {
        self.lock().pending_ops()
    }

    /// Number of launches so far.
    pub fn launches(&self) -> u64 {
        self.lock().launches
    }

    /// Bytes of device memory that are allocated, and bytes of main memory that are page-locked.
    pub fn allocated_bytes(&self) -> (u64, u64) {
        let state = self.lock();
        (state.device.bytes(), state.host.bytes() + state.registered.values().sum::<usize>() as u64)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn submit(&self, stream: Stream, act: StreamOp, fault: Option<EmulatorFault>) -> Result<()> {
        let mut state = self.lock();
        let fails = fault.is_some_and(|fault| state.fails(fault));
        if fails && state.below(2) == 0 {
            return Err(GpuError::failed(act.name(), "injected fault"));
        }
        state.submit(stream, QueuedOp { act, fails });
        // The device may execute some work meanwhile.
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
        self.lock().warm_up
    }

    fn probe_bytes(&self) -> u64 {
        1 << 20
    }

    fn has_tensor_cores(&self) -> bool {
        self.has_tensor_cores
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
        NonNull::new(at as *mut u8).ok_or_else(|| GpuError::failed("allocating page-locked memory", "there is none"))
    }

    unsafe fn free_host(&self, at: NonNull<u8>) {
        let (mut state, at) = (self.lock(), at.as_ptr() as usize);
        assert!(!state.is_used(at, state.host.len_of(at)), "memory was freed that pending work uses");
        state.host.free(at);
    }

    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        if state.refuses_to_register {
            return Err(GpuError::failed("page-locking memory", "injected fault"));
        }
        state.registered.insert(from as usize, bytes);
        Ok(())
    }

    unsafe fn unregister(&self, from: *const u8) {
        let (mut state, from) = (self.lock(), from as usize);
        let bytes = state.registered.remove(&from).expect("the memory was registered");
        assert!(!state.is_used(from, bytes), "memory was unregistered that pending work uses");
    }

    fn create_event(&self) -> Result<EventHandle> {
        Ok(EventHandle(self.lock().create_event()))
    }

    unsafe fn destroy_event(&self, _: EventHandle) {}

    fn record(&self, event: EventHandle, stream: Stream) -> Result<()> {
        let recording = self.lock().recording(event.0, stream);
        self.submit(stream, StreamOp::Record(event.0, recording), None)
    }

    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()> {
        let recorded = self.lock().recorded(event.0);
        self.submit(stream, StreamOp::WaitEvent(event.0, recorded), None)
    }

    fn is_complete(&self, event: EventHandle) -> Result<bool> {
        let mut state = self.lock();
        state.step(self.kernels);
        if state.is_complete(event.0) { state.result(event.0).map(|()| true) } else { Ok(false) }
    }

    fn synchronise(&self, event: EventHandle) -> Result<()> {
        let mut state = self.lock();
        while !state.is_complete(event.0) {
            assert!(state.step(self.kernels), "deadlock: streams wait for each other");
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
        self.submit(stream, StreamOp::Copy { from, to: to as usize, bytes }, Some(EmulatorFault::CopyIn))
    }

    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()> {
        let to = to as usize;
        self.lock().check_copy(to, from as usize, bytes)?;
        self.submit(stream, StreamOp::Copy { from: from as usize, to, bytes }, Some(EmulatorFault::CopyOut))
    }

    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()> {
        let Launch { kernel, grid, block, arguments } = *launch;
        let mut state = self.lock();
        state.check_launch(kernel, arguments)?;
        state.launches += 1;
        drop(state);
        self.submit(
            stream,
            StreamOp::Launch { kernel, grid, block, arguments: arguments.to_vec() },
            Some(EmulatorFault::Launch),
        )
    }

    unsafe fn create_graph(&self, launches: &[Launch]) -> Result<Option<GraphHandle>> {
        let mut state = self.lock();
        if state.fails(EmulatorFault::Launch) {
            return Err(GpuError::failed("making a graph", "injected fault"));
        }
        let op = |launch: &Launch| {
            let Launch { kernel, grid, block, arguments } = *launch;
            GraphLaunch { kernel, grid, block, arguments: arguments.to_vec() }
        };
        state.graphs.push(launches.iter().map(op).collect());
        Ok(Some(GraphHandle(state.graphs.len() - 1)))
    }

    unsafe fn launch_graph(&self, graph: GraphHandle) -> Result<()> {
        let launches = self.lock().graphs[graph.0].clone();
        launches.iter().try_for_each(|launch| {
            let GraphLaunch { kernel, grid, block, arguments } = launch;
            // SAFETY: as the caller guarantees.
            unsafe { self.launch(Stream::Compute, &Launch { kernel, grid: *grid, block: *block, arguments }) }
        })
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        self.lock().graphs[graph.0] = Vec::new();
    }
}
