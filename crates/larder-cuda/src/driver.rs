//! The seam to a GPU: memory, copies, launches, and their order. Methods whose callers have obligations are `unsafe`.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use crate::error::Result;

/// A queue of work on the GPU. Work on one stream runs in order; two streams are ordered only by events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Kernels, and the copies of their inputs and outputs.
    Compute,
    /// Copies of experts from main memory.
    CopyIn,
    /// Copies of experts to main memory.
    CopyOut,
    /// Copies of experts, in either direction, for which nothing waits.
    CopyAhead,
}

impl Stream {
    /// Every stream.
    pub const ALL: [Stream; 4] = [Stream::Compute, Stream::CopyIn, Stream::CopyOut, Stream::CopyAhead];
}

/// The handle of an event: a point in a stream. Created by [`Driver::create_event`], set by [`Driver::record`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventHandle(pub(crate) usize);

/// The handle of a graph: launches that a device has been given as one. Created by [`Driver::create_graph`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GraphHandle(pub(crate) usize);

/// Name, compute capability and memory of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuInfo {
    /// Product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Free bytes of its memory.
    pub free_bytes: u64,
    /// Total bytes of its memory.
    pub total_bytes: u64,
}

impl fmt::Display for GpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (major, minor) = self.capability;
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let (free, total) = (gb(self.free_bytes), gb(self.total_bytes));
        write!(f, "{} (compute capability {major}.{minor}, {free:.1} of {total:.1} GB free)", self.name)
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Argument {
    /// An address in device memory.
    Address(u64),
    /// A count of bytes.
    Bytes(u64),
    /// A 32-bit number.
    Word(u32),
    /// A 32-bit float.
    Float(f32),
    /// A 64-bit float.
    Double(f64),
}

impl Argument {
    /// A pointer to the value, as launch functions take it.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub(crate) fn pointer(&self) -> *mut std::ffi::c_void {
        match self {
            Argument::Address(value) | Argument::Bytes(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Word(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Double(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

/// The most arguments of a kernel.
pub const MAX_ARGUMENTS: usize = 12;

/// One start of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Name of the kernel in the sources.
    pub kernel: &'static str,
    /// Number of blocks in x and y.
    pub grid: [u32; 2],
    /// Threads per block.
    pub block: u32,
    /// Arguments, in the order of the kernel's parameters.
    pub arguments: &'a [Argument],
}

/// A GPU: its memory, streams, events, copies and launches.
///
/// Copies and launches may still be in flight when their methods return. One that fails while it runs is reported by
/// the events after it on its stream: by all of them, but on the copy streams perhaps only by the next one.
pub trait Driver: Send + Sync {
    /// Name, compute capability, and total and free memory.
    fn info(&self) -> Result<GpuInfo>;

    /// How long it has to work, after being idle, until its clocks are up.
    fn warm_up(&self) -> Duration;

    /// Bytes of its memory that are read to measure its bandwidth: more than its caches hold.
    fn probe_bytes(&self) -> u64 {
        256 << 20
    }

    /// Whether it has the instructions `mma.m16n8k32` for bytes and `mma.m16n8k16` for halves.
    fn has_tensor_cores(&self) -> bool {
        false
    }

    /// Allocates device memory. Its contents are unspecified.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Frees device memory, after all submitted work is complete.
    ///
    /// # Safety
    /// The address came from [`allocate`](Self::allocate), is freed once, and no work that is submitted later uses it.
    unsafe fn free(&self, at: u64);

    /// Allocates page-locked main memory, zeroed and aligned to 256 bytes. Kernels may use it at the same address.
    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Frees page-locked memory.
    ///
    /// # Safety
    /// It came from [`allocate_host`](Self::allocate_host), is freed once, and no copy or kernel in flight uses it.
    unsafe fn free_host(&self, at: NonNull<u8>);

    /// Page-locks existing main memory, so that copies access it directly.
    ///
    /// # Safety
    /// The memory stays mapped until it is unregistered, or at least nothing else is mapped at its addresses.
    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()>;

    /// Ends the page-locking of registered memory.
    ///
    /// # Safety
    /// It was [registered](Self::register), and no copy in flight uses it.
    unsafe fn unregister(&self, from: *const u8);

    /// Creates an event, which counts as complete until it is recorded.
    fn create_event(&self) -> Result<EventHandle>;

    /// Destroys an event.
    ///
    /// # Safety
    /// The handle is not used any more.
    unsafe fn destroy_event(&self, event: EventHandle);

    /// Records the event after all work submitted to the stream so far.
    fn record(&self, event: EventHandle, stream: Stream) -> Result<()>;

    /// Records the event where only waiting for it matters, not its time: it may be recorded when the host asks for it,
    /// behind later work.
    fn mark(&self, event: EventHandle, stream: Stream) -> Result<()> {
        self.record(event, stream)
    }

    /// Submits launches that were collected, so that they run while the host does something else.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Makes later work on the stream wait for the event, as recorded last.
    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()>;

    /// Whether all work before the event is complete. An error says that some of that work failed.
    fn is_complete(&self, event: EventHandle) -> Result<bool>;

    /// Waits until all work before the event is complete. An error says that some of that work failed.
    fn synchronise(&self, event: EventHandle) -> Result<()>;

    /// The time between two complete events of one stream.
    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration>;

    /// Waits until no work is in flight; failures are ignored.
    fn drain(&self);

    /// Copies from page-locked memory to the device.
    ///
    /// # Safety
    /// Both places have `bytes` bytes, and the bytes at `from` are not written to until the copy is complete.
    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()>;

    /// Copies from the device to page-locked memory.
    ///
    /// # Safety
    /// Both places have `bytes` bytes, and the bytes at `to` are not accessed until the copy is complete.
    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments match the parameters of the kernel, and the memory that they name lives until it is complete.
    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()>;

    /// Makes one of launches that run in order, without starting them; `None` where there are no graphs.
    ///
    /// # Safety
    /// As of [`launch`](Self::launch), whenever it is launched.
    unsafe fn create_graph(&self, launches: &[Launch]) -> Result<Option<GraphHandle>> {
        let _ = launches;
        Ok(None)
    }

    /// Launches a graph on the compute stream.
    ///
    /// # Safety
    /// It was created and not destroyed, and the memory that its launches name lives until they are complete.
    unsafe fn launch_graph(&self, graph: GraphHandle) -> Result<()> {
        unreachable!("{graph:?} was not created by this driver")
    }

    /// Destroys a graph.
    ///
    /// # Safety
    /// It was created, is not in flight, and is not used any more.
    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        let _ = graph;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_displays_as_one_line() {
        let info = GpuInfo {
            name: "Card".into(),
            capability: (8, 9),
            free_bytes: 15_960_000_000,
            total_bytes: 16_900_000_000,
        };
        assert_eq!(info.to_string(), "Card (compute capability 8.9, 16.0 of 16.9 GB free)");
    }
}
