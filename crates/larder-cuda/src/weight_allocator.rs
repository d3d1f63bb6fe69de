//! Room for weights that stay: taken at once, as a driver rounds up whatever is taken.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::DeviceBuffer;

/// What matrices begin at a multiple of.
const ALIGN: u64 = 256;
/// What is taken at least where matrices turn out to need more: the driver rounds to a few MiB.
const MORE: u64 = 16 << 20;

/// Bytes that [`Gpu::products`](crate::Gpu::products) takes for matrices of these sizes.
pub fn resident_bytes(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
}

/// Rooms that are filled one after the other.
pub struct WeightAllocator {
    driver: Arc<dyn Driver>,
    rooms: Vec<DeviceBuffer>,
    /// The part of the last room that is free.
    free: (u64, u64),
}

impl WeightAllocator {
    /// With a room of so many bytes.
    pub fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let mut resident = WeightAllocator { driver: driver.clone(), rooms: Vec::new(), free: (0, 0) };
        resident.take(bytes)?;
        Ok(resident)
    }

    /// A place for so many bytes, in another room if the last is full.
    pub fn place(&mut self, bytes: u64) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        if bytes > self.free.1 - self.free.0 {
            // Where no more than the matrix fits, that will do.
            self.take(bytes.max(MORE)).or_else(|_| self.take(bytes))?;
        }
        let at = self.free.0;
        self.free.0 += bytes;
        Ok(at)
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        let room = DeviceBuffer::of(&self.driver, bytes as usize)?;
        self.free = (room.at(), room.at() + bytes);
        self.rooms.push(room);
        Ok(())
    }
}
