//! Memory of both sides, and events, that give themselves back.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Driver, EventHandle, Stream};
use crate::error::Result;
use crate::launches::Launches;

/// What buffers grow by at least.
const STEP: usize = 64 * 1024;
/// The most that a kernel copies. A card copies one thing at a time each way, whatever the streams, and what kernels wait
/// for would wait behind whole experts, of 3 to 25 MB. What is longer than this belongs to many tokens, where computing
/// takes so long that the wait does not count.
const MAX_KERNEL_COPY_BYTES: usize = 1 << 20;
/// What a kernel copies begins at a multiple of this.
const ALIGN: u64 = 16;

/// An event.
pub struct StreamEvent {
    driver: Arc<dyn Driver>,
    event: EventHandle,
}

impl StreamEvent {
    /// One that counts as over until it is recorded.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(StreamEvent { driver: driver.clone(), event: driver.create_event()? })
    }

    /// Behind all that was asked of the stream so far.
    pub fn record(&self, stream: Stream) -> Result<()> {
        self.driver.record(self.event, stream)
    }

    /// Lets a stream wait for it.
    pub fn make_wait(&self, stream: Stream) -> Result<()> {
        self.driver.wait_event(stream, self.event)
    }

    /// Whether all before it is over.
    pub fn is_complete(&self) -> Result<bool> {
        self.driver.is_complete(self.event)
    }

    /// Waits until all before it is over.
    pub fn synchronise(&self) -> Result<()> {
        self.driver.synchronise(self.event)
    }

    /// The time since an earlier one of the same stream; both are over.
    pub fn since(&self, earlier: &StreamEvent) -> Result<Duration> {
        self.driver.elapsed(earlier.event, self.event)
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: nobody else knows it.
        unsafe { self.driver.destroy_event(self.event) }
    }
}

/// Memory of the device. What is in it is lost when it grows.
pub struct DeviceBuffer {
    driver: Arc<dyn Driver>,
    at: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// None yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        DeviceBuffer { driver: driver.clone(), at: 0, bytes: 0 }
    }

    /// Exactly so much of it.
    pub fn of(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let mut room = DeviceBuffer::new(driver);
        room.replace(bytes)?;
        Ok(room)
    }

    /// Takes care that there are at least so many bytes.
    pub fn ensure(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.bytes { self.replace(bytes.next_multiple_of(STEP)) } else { Ok(()) }
    }

    /// Where it begins.
    pub fn at(&self) -> u64 {
        self.at
    }

    fn replace(&mut self, bytes: usize) -> Result<()> {
        self.give_back();
        if bytes > 0 {
            self.at = self.driver.allocate(bytes as u64)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    fn give_back(&mut self) {
        if std::mem::take(&mut self.bytes) > 0 {
            // SAFETY: it is this room's own, and from now on nobody's.
            unsafe { self.driver.free(self.at) }
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Page-locked memory of this machine.
pub struct PinnedBuffer {
    driver: Arc<dyn Driver>,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is the only way to its bytes.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared it only gives shared bytes.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// None yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        PinnedBuffer { driver: driver.clone(), at: NonNull::<u128>::dangling().cast(), bytes: 0 }
    }

    /// Exactly so much of it.
    pub fn of(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let mut pinned = PinnedBuffer::new(driver);
        if bytes > 0 {
            pinned.at = driver.allocate_host(bytes)?;
            pinned.bytes = bytes;
        }
        Ok(pinned)
    }

    /// Takes care that there are at least so many bytes. The caller guarantees that no copy uses it.
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
        // SAFETY: so many bytes are there, zeros at first.
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
            // SAFETY: its own; whoever copies waits before it lets go of it.
            unsafe { self.driver.free_host(self.at) }
        }
    }
}

/// Bytes on their way to kernels: written here, then copied in front of them.
pub struct Upload {
    driver: Arc<dyn Driver>,
    host: PinnedBuffer,
    device: DeviceBuffer,
    sent: StreamEvent,
    bytes: usize,
}

impl Upload {
    /// Nothing yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let (host, device, sent) = (PinnedBuffer::new(driver), DeviceBuffer::new(driver), StreamEvent::new(driver)?);
        Ok(Upload { driver: driver.clone(), host, device, sent, bytes: 0 })
    }

    /// Where so many bytes will be on the device, and what to write them to here. Waits for what was sent before.
    pub fn begin(&mut self, bytes: usize) -> Result<(u64, &mut [u8])> {
        self.sent.synchronise()?;
        self.host.ensure(bytes)?;
        self.device.ensure(bytes)?;
        self.bytes = bytes;
        Ok((self.device.at(), &mut self.host[..bytes]))
    }

    /// Copies them on the stream of the kernels.
    pub fn send(&mut self) -> Result<()> {
        if !is_kernel_copy(self.device.at(), self.bytes) {
            return self.send_to(self.device.at());
        }
        Launches::new(&self.driver).copy_bytes(self.host.as_ptr() as u64, self.device.at(), self.bytes as u64)?;
        self.sent.record(Stream::Compute)
    }

    /// Copies bytes, of which there may be many, to a place of the device that has room for them.
    pub fn copy(&mut self, bytes: &[u8], to: u64) -> Result<()> {
        self.sent.synchronise()?;
        self.host.ensure(bytes.len())?;
        self.bytes = bytes.len();
        self.host[..bytes.len()].copy_from_slice(bytes);
        self.send_to(to)
    }

    fn send_to(&mut self, to: u64) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the bytes are there, and are written again, or given back, only behind `sent`.
        unsafe { self.driver.copy_in(Stream::Compute, self.host.as_ptr(), to, self.bytes)? };
        self.sent.record(Stream::Compute)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.sent.synchronise().is_err() {
            self.driver.drain();
        }
    }
}

/// Bytes on their way from kernels.
pub struct Download {
    driver: Arc<dyn Driver>,
    host: PinnedBuffer,
    arrived: StreamEvent,
}

impl Download {
    /// Nothing yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let (host, arrived) = (PinnedBuffer::new(driver), StreamEvent::new(driver)?);
        Ok(Download { driver: driver.clone(), host, arrived })
    }

    /// Takes care that there is room for so many bytes.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.host.ensure(bytes) // Whoever fetches waits, so no copy is under way.
    }

    /// Copies so many bytes of the device, which are there, behind what computes them, and waits for them. Waits for all
    /// that is under way also after an error.
    pub fn fetch(&mut self, from: u64, bytes: usize) -> Result<&[u8]> {
        let fetched = self.copy_and_wait(from, bytes);
        if fetched.is_err() {
            self.driver.drain();
        }
        fetched.map(|()| &self.host[..bytes])
    }

    fn copy_and_wait(&mut self, from: u64, bytes: usize) -> Result<()> {
        self.reserve(bytes)?;
        if is_kernel_copy(from, bytes) {
            Launches::new(&self.driver).copy_bytes(from, self.host.as_mut_ptr() as u64, bytes as u64)?;
        } else if bytes > 0 {
            // SAFETY: there is room, and nobody looks at it before `arrived` is over.
            unsafe { self.driver.copy_out(Stream::Compute, from, self.host.as_mut_ptr(), bytes)? };
        }
        self.arrived.record(Stream::Compute)?;
        self.arrived.synchronise()
    }
}

/// Whether a kernel copies so many bytes from or to this place of the device.
fn is_kernel_copy(at: u64, bytes: usize) -> bool {
    (1..=MAX_KERNEL_COPY_BYTES).contains(&bytes) && at.is_multiple_of(ALIGN)
}
