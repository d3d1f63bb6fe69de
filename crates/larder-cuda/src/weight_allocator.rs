//! Device memory for resident weights: few large buffers, because the driver rounds up every allocation.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::DeviceBuffer;

/// Alignment of matrices in bytes.
const ALIGN: u64 = 256;
/// Size of what all values of a matrix are multiplied with, for which there is room behind each.
const SCALE_BYTES: u64 = 4;
/// Least size of a further buffer if the first is too small: the driver rounds to a few MiB.
const MORE: u64 = 16 << 20;

/// Bytes that [`Gpu::products`](crate::Gpu::products) needs for matrices of these sizes.
pub fn resident_bytes(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.map(padded).sum()
}

fn padded(bytes: u64) -> u64 {
    (bytes + SCALE_BYTES).next_multiple_of(ALIGN)
}

/// A bump allocator: buffers that are filled one after another and never freed in part.
pub struct WeightAllocator {
    driver: Arc<dyn Driver>,
    buffers: Vec<DeviceBuffer>,
    /// The free part of the last buffer: start and end address.
    free: (u64, u64),
}

impl WeightAllocator {
    /// With a first buffer of `bytes` bytes.
    pub fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let mut allocator = WeightAllocator { driver: driver.clone(), buffers: Vec::new(), free: (0, 0) };
        allocator.take(bytes)?;
        Ok(allocator)
    }

    /// The address of a matrix of `bytes` bytes and its scale, in a new buffer if the last one is full.
    pub fn place(&mut self, bytes: u64) -> Result<u64> {
        let bytes = padded(bytes);
        if bytes > self.free.1 - self.free.0 {
            // If that much memory is not free, the size of the matrix is enough.
            self.take(bytes.max(MORE)).or_else(|_| self.take(bytes))?;
        }
        let at = self.free.0;
        self.free.0 += bytes;
        Ok(at)
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        let buffer = DeviceBuffer::of(&self.driver, bytes as usize)?;
        self.free = (buffer.at(), buffer.at() + bytes);
        self.buffers.push(buffer);
        Ok(())
    }
}
