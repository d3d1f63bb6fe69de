//! The seam to a GPU: memory, copies, launches, and the order among them. It says `unsafe` where others have to take care.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use crate::error::Result;

/// What happens on one stream happens in the order asked for; two streams know of each other through events alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Kernels, and the copies of what they need and give.
    Compute,
    /// Experts from memory.
    CopyIn,
    /// Experts to memory.
    CopyOut,
}

impl Stream {
    /// All of them.
    pub const ALL: [Stream; 3] = [Stream::Compute, Stream::CopyIn, Stream::CopyOut];
}

/// A point in a stream, named before it is set. Made by [`Driver::create_event`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventHandle(pub(crate) usize);

/// What is known of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuInfo {
    /// As its maker calls it.
    pub name: String,
    /// Its compute capability, major and minor.
    pub capability: (u32, u32),
    /// Bytes of its memory that nobody uses.
    pub free_bytes: u64,
    /// Bytes of its memory.
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

/// What a kernel is called with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Argument {
    /// An address in the device's memory.
    Address(u64),
    /// A count of bytes.
    Bytes(u64),
    /// A 32-bit number.
    Word(u32),
    /// A 32-bit float.
    Float(f32),
}

impl Argument {
    /// Its value, as those who call kernels take it.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub(crate) fn pointer(&self) -> *mut std::ffi::c_void {
        match self {
            Argument::Address(value) | Argument::Bytes(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Word(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Argument::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
        }
    }
}

/// A kernel to be run.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Its name in the sources.
    pub kernel: &'static str,
    /// Blocks in both directions.
    pub grid: [u32; 2],
    /// Threads of a block.
    pub block: u32,
    /// In the order that the kernel takes them.
    pub arguments: &'a [Argument],
}

/// A GPU that memory can be had from, and that is told what to do.
///
/// Copies and launches may only have begun when they return. One that fails while it runs is reported by the events
/// behind it on its stream: by all of them, but on the streams of experts perhaps only by the next.
pub trait Driver: Send + Sync {
    /// What it is, and how much of its memory is free now.
    fn info(&self) -> Result<GpuInfo>;

    /// How much work it takes until its clocks are up, after it had nothing to do.
    fn warm_up(&self) -> Duration;

    /// Matrices with fewer bytes are multiplied with faster than inputs get there and outputs back.
    fn min_matrix_bytes(&self) -> usize;

    /// Takes some of the device's memory. What is in it is unspecified.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Gives memory back once all that was asked for is over.
    ///
    /// # Safety
    /// It came from [`allocate`](Self::allocate), is given back once, and nothing that is asked for later uses it.
    unsafe fn free(&self, at: u64);

    /// Takes some page-locked memory of this machine, aligned to 256 bytes, all zeros. Kernels may use it at the same
    /// address.
    fn allocate_host(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Gives page-locked memory back.
    ///
    /// # Safety
    /// It came from [`allocate_host`](Self::allocate_host), is given back once, and no copy and no kernel that uses it is under way.
    unsafe fn free_host(&self, at: NonNull<u8>);

    /// Page-locks memory of this machine where it is, so that copies go there and back without a detour.
    ///
    /// # Safety
    /// The memory stays mapped until it is let go of, or at least nothing else comes to these addresses.
    unsafe fn register(&self, from: *const u8, bytes: usize) -> Result<()>;

    /// Lets go of what was page-locked where it is.
    ///
    /// # Safety
    /// It was [registered](Self::register), and no copy that uses it is under way.
    unsafe fn unregister(&self, from: *const u8);

    /// A new event, which counts as over until it is recorded.
    fn create_event(&self) -> Result<EventHandle>;

    /// Forgets an event.
    ///
    /// # Safety
    /// Nobody uses it from now on.
    unsafe fn destroy_event(&self, event: EventHandle);

    /// Sets the event behind all that was asked of the stream so far.
    fn record(&self, event: EventHandle, stream: Stream) -> Result<()>;

    /// Lets the stream go on only when the event, as recorded last, is over.
    fn wait_event(&self, stream: Stream, event: EventHandle) -> Result<()>;

    /// Whether all before the event is over. An error says that something there failed.
    fn is_complete(&self, event: EventHandle) -> Result<bool>;

    /// Waits until all before the event is over. An error says that something there failed.
    fn synchronise(&self, event: EventHandle) -> Result<()>;

    /// The time between two events of one stream that are over.
    fn elapsed(&self, from: EventHandle, to: EventHandle) -> Result<Duration>;

    /// Waits until nothing is under way, however it went.
    fn drain(&self);

    /// Copies from page-locked memory to the device.
    ///
    /// # Safety
    /// There are so many bytes in both places, and nobody writes to those here until the copy is over.
    unsafe fn copy_in(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<()>;

    /// Copies from the device to page-locked memory.
    ///
    /// # Safety
    /// There are so many bytes in both places, and nobody uses those here until the copy is over.
    unsafe fn copy_out(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<()>;

    /// Runs a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and what they name is there until it is over.
    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_a_line() {
        let facts = GpuInfo {
            name: "Card".into(),
            capability: (8, 9),
            free_bytes: 15_960_000_000,
            total_bytes: 16_900_000_000,
        };
        assert_eq!(facts.to_string(), "Card (compute capability 8.9, 16.0 of 16.9 GB free)");
    }
}
