//! Owned buffers on the device and in main memory, owned events, and staged copies between the two.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Driver, EventHandle, Stream};
use crate::error::{GpuError, Result};
use crate::launches::Launches;

/// Buffers grow by a multiple of this many bytes.
const STEP: usize = 64 * 1024;
/// The longest copy that a kernel makes. The copy engine makes one copy at a time in each direction, whatever the
/// stream, so inputs and outputs would queue behind whole experts, of 3 to 25 MB. Longer copies belong to many tokens,
/// where computing takes so long that the wait does not matter.
const MAX_KERNEL_COPY_BYTES: usize = 1 << 20;
/// Alignment of copies that a kernel makes.
const ALIGN: u64 = 16;

/// An owned event.
pub struct StreamEvent {
    driver: Arc<dyn Driver>,
    event: EventHandle,
}

impl StreamEvent {
    /// An event that counts as complete until it is recorded.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(StreamEvent { driver: driver.clone(), event: driver.create_event()? })
    }

    /// Records the event after all work submitted to the stream so far.
    pub fn record(&self, stream: Stream) -> Result<()> {
        self.driver.record(self.event, stream)
    }

    /// As [`record`](Self::record), where only waiting for it matters, not its time.
    pub fn mark(&self, stream: Stream) -> Result<()> {
        self.driver.mark(self.event, stream)
    }

    /// Makes later work on the stream wait for the event.
    pub fn make_wait(&self, stream: Stream) -> Result<()> {
        self.driver.wait_event(stream, self.event)
    }

    /// Whether all work before the event is complete.
    pub fn is_complete(&self) -> Result<bool> {
        self.driver.is_complete(self.event)
    }

    /// Waits until all work before the event is complete.
    pub fn synchronise(&self) -> Result<()> {
        self.driver.synchronise(self.event)
    }

    /// The time since an earlier event of the same stream; both are complete.
    pub fn since(&self, earlier: &StreamEvent) -> Result<Duration> {
        self.driver.elapsed(earlier.event, self.event)
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: the handle is not shared.
        unsafe { self.driver.destroy_event(self.event) }
    }
}

/// A buffer in device memory. Its contents are lost when it grows.
pub struct DeviceBuffer {
    driver: Arc<dyn Driver>,
    at: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// An empty buffer.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        DeviceBuffer { driver: driver.clone(), at: 0, bytes: 0 }
    }

    /// A buffer of exactly `bytes` bytes.
    pub fn of(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let mut buffer = DeviceBuffer::new(driver);
        buffer.replace(bytes)?;
        Ok(buffer)
    }

    /// Grows the buffer to at least `bytes` bytes.
    pub fn ensure(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.bytes { self.replace(bytes.next_multiple_of(STEP)) } else { Ok(()) }
    }

    /// Address of the buffer.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn replace(&mut self, bytes: usize) -> Result<()> {
        self.release();
        if bytes > 0 {
            self.at = self.driver.allocate(bytes as u64)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.bytes) > 0 {
            // SAFETY: this buffer owns the memory, and forgets it here.
            unsafe { self.driver.free(self.at) }
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.release();
    }
}

/// A buffer in page-locked main memory.
pub struct PinnedBuffer {
    driver: Arc<dyn Driver>,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the buffer is the only access to its bytes.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference only gives shared access to the bytes.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// An empty buffer.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        PinnedBuffer { driver: driver.clone(), at: NonNull::<u128>::dangling().cast(), bytes: 0 }
    }

    /// A buffer of exactly `bytes` bytes.
    pub fn of(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let mut pinned = PinnedBuffer::new(driver);
        if bytes > 0 {
            pinned.at = driver.allocate_host(bytes)?;
            pinned.bytes = bytes;
        }
        Ok(pinned)
    }

    /// Grows the buffer to at least `bytes` bytes. The caller guarantees that no copy uses it.
    fn ensure(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.bytes {
            *self = PinnedBuffer::of(&self.driver, bytes.next_multiple_of(STEP))?;
        }
        Ok(())
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation has `bytes` bytes, which are initialised to zero.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: this buffer owns the memory; its user waits for copies before dropping it.
            unsafe { self.driver.free_host(self.at) }
        }
    }
}

/// A staged copy to the device: written in main memory, then copied before the kernels that read it.
pub struct Upload {
    driver: Arc<dyn Driver>,
    host: PinnedBuffer,
    device: DeviceBuffer,
    sent: StreamEvent,
    bytes: usize,
}

impl Upload {
    /// Without buffers.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let (host, device, sent) = (PinnedBuffer::new(driver), DeviceBuffer::new(driver), StreamEvent::new(driver)?);
        Ok(Upload { driver: driver.clone(), host, device, sent, bytes: 0 })
    }

    /// The address that `bytes` bytes will have on the device, and the staging memory to write them to. Waits for the
    /// copy before.
    pub fn begin(&mut self, bytes: usize) -> Result<(u64, &mut [u8])> {
        self.sent.synchronise()?;
        self.host.ensure(bytes)?;
        self.device.ensure(bytes)?;
        self.bytes = bytes;
        Ok((self.device.at(), &mut self.host[..bytes]))
    }

    /// Copies the staged bytes, on the compute stream.
    pub fn send(&mut self) -> Result<()> {
        // SAFETY: both places have the bytes; the staging memory is written or freed only after `sent` is complete.
        unsafe { copy_in(&self.driver, self.host.as_ptr(), self.device.at(), self.bytes)? };
        self.sent.mark(Stream::Compute)
    }

    /// Copies `bytes` to address `to`, which has room for them.
    pub fn copy(&mut self, bytes: &[u8], to: u64) -> Result<()> {
        self.write(bytes.len(), to, &mut |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Copies `bytes` bytes, which `write` writes, to address `to`, which has room for them.
    pub fn write<E: From<GpuError>>(
        &mut self,
        bytes: usize,
        to: u64,
        write: &mut dyn FnMut(&mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        self.sent.synchronise()?;
        self.host.ensure(bytes)?;
        write(&mut self.host[..bytes])?;
        self.bytes = bytes;
        Ok(self.send_to(to)?)
    }

    fn send_to(&mut self, to: u64) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: both places have the bytes; the staging memory is written or freed only after `sent` is complete.
        unsafe { self.driver.copy_in(Stream::Compute, self.host.as_ptr(), to, self.bytes)? };
        self.sent.mark(Stream::Compute)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.sent.synchronise().is_err() {
            self.driver.drain();
        }
    }
}

/// A staged copy from the device.
pub struct Download {
    driver: Arc<dyn Driver>,
    host: PinnedBuffer,
    arrived: StreamEvent,
    /// Whether a copy was begun that nothing has waited for.
    in_flight: bool,
}

impl Download {
    /// Without a buffer.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let (host, arrived) = (PinnedBuffer::new(driver), StreamEvent::new(driver)?);
        Ok(Download { driver: driver.clone(), host, arrived, in_flight: false })
    }

    /// Grows the staging memory to at least `bytes` bytes.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.settle()?;
        self.host.ensure(bytes)
    }

    /// Begins to copy bytes from each of some places, given as address and number of bytes, after the kernels submitted
    /// so far. [`end`](Self::end) waits for them only, and not for what is submitted after this call.
    pub fn begin(&mut self, places: &[(u64, usize)]) -> Result<()> {
        self.copy(places)?;
        self.in_flight = true;
        self.arrived.record(Stream::Compute)
    }

    /// Waits for the copy that was begun last, and returns all staged bytes: each place [is where](Self::staged) its
    /// number says. After an error it waits for all work in flight.
    pub fn end(&mut self) -> Result<&[u8]> {
        self.settle().map(|()| &self.host[..])
    }

    /// Where the bytes of each place are among those that are staged.
    pub fn staged(places: &[(u64, usize)]) -> impl Iterator<Item = Range<usize>> {
        places.iter().scan(0, |end, (_, bytes)| {
            let start = *end;
            *end = (start + bytes).next_multiple_of(ALIGN as usize);
            Some(start..start + bytes)
        })
    }

    /// Waits for a copy that was begun.
    fn settle(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.in_flight) {
            return Ok(());
        }
        let arrived = self.arrived.synchronise();
        if arrived.is_err() {
            self.driver.drain();
        }
        arrived
    }

    /// Copies `bytes` bytes from address `from`, after the kernels submitted so far, and waits for them. After an error
    /// it waits for all work in flight.
    pub fn fetch(&mut self, from: u64, bytes: usize) -> Result<&[u8]> {
        self.fetch_all(&[(from, bytes)]).map(|all| &all[..bytes])
    }

    /// As [`fetch`](Self::fetch), from several places with one wait. Returns all staged bytes, as [`end`](Self::end).
    pub fn fetch_all(&mut self, places: &[(u64, usize)]) -> Result<&[u8]> {
        let fetched = self.copy_and_wait(places);
        if fetched.is_err() {
            self.driver.drain();
        }
        fetched.map(|()| &self.host[..])
    }

    fn copy_and_wait(&mut self, places: &[(u64, usize)]) -> Result<()> {
        self.copy(places)?;
        self.arrived.mark(Stream::Compute)?;
        self.arrived.synchronise()
    }

    fn copy(&mut self, places: &[(u64, usize)]) -> Result<()> {
        self.reserve(Self::staged(places).last().map_or(0, |last| last.end))?;
        for ((from, bytes), to) in places.iter().zip(Self::staged(places)) {
            let to = &mut self.host[to];
            if is_kernel_copy(*from, *bytes) {
                Launches::new(&self.driver).copy_bytes(*from, to.as_mut_ptr() as u64, *bytes as u64)?;
            } else if *bytes > 0 {
                // SAFETY: the staging memory has `bytes` bytes, and is not read before `arrived` is complete.
                unsafe { self.driver.copy_out(Stream::Compute, *from, to.as_mut_ptr(), *bytes)? };
            }
        }
        Ok(())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // It waits also after an error.
        let _ = self.settle();
    }
}

/// Copies bytes from page-locked memory to the device, on the compute stream.
///
/// # Safety
/// Both places have `bytes` bytes, and the bytes at `from` are not written to until the copy is complete.
pub unsafe fn copy_in(driver: &Arc<dyn Driver>, from: *const u8, to: u64, bytes: usize) -> Result<()> {
    match bytes {
        0 => Ok(()),
        _ if is_kernel_copy(to, bytes) => Launches::new(driver).copy_bytes(from as u64, to, bytes as u64),
        // SAFETY: as the caller guarantees.
        _ => unsafe { driver.copy_in(Stream::Compute, from, to, bytes) },
    }
}

/// Whether a copy of `bytes` bytes from or to this address of the device is made by a kernel.
pub fn is_kernel_copy(at: u64, bytes: usize) -> bool {
    (1..=MAX_KERNEL_COPY_BYTES).contains(&bytes) && at.is_multiple_of(ALIGN)
}
