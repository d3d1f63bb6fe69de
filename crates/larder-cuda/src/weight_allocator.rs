//! Device memory for resident weights: few large buffers, because the driver rounds up every allocation.

use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::DeviceBuffer;

/// Alignment of matrices in bytes.
const ALIGN: u64 = 256;
/// Least size of a further buffer, if the first is too small: the driver rounds to as much.
const MORE: u64 = 2 << 20;

/// Bytes that [`Gpu::products`](crate::Gpu::products) needs for matrices of these sizes.
pub fn resident_bytes(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
}

/// A bump allocator: buffers that are filled one after another and never freed in part.
pub struct WeightAllocator {
    driver: Arc<dyn Driver>,
    buffers: Vec<DeviceBuffer>,
    /// The free part of each buffer: start and end address.
    free: Vec<(u64, u64)>,
}

impl WeightAllocator {
    /// With a first buffer of `bytes` bytes.
    pub fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let mut allocator = WeightAllocator { driver: driver.clone(), buffers: Vec::new(), free: Vec::new() };
        allocator.take(bytes)?;
        Ok(allocator)
    }

    /// The address of `bytes` bytes, in a new buffer if all others are full.
    pub fn place(&mut self, bytes: u64) -> Result<u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        if let Some(at) = self.place_in_free(bytes) {
            return Ok(at);
        }
        // If that much memory is not free, the size of the matrix is enough.
        self.take(bytes.max(MORE)).or_else(|_| self.take(bytes))?;
        Ok(self.place_in_free(bytes).expect("the new buffer has room"))
    }

    fn place_in_free(&mut self, bytes: u64) -> Option<u64> {
        let free = self.free.iter_mut().find(|(start, end)| bytes <= end - start)?;
        free.0 += bytes;
        Some(free.0 - bytes)
    }

    fn take(&mut self, bytes: u64) -> Result<()> {
        let buffer = DeviceBuffer::of(&self.driver, bytes as usize)?;
        self.free.push((buffer.at(), buffer.at() + bytes));
        self.buffers.push(buffer);
        Ok(())
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::emulator::Emulator;

    #[test]
    fn what_does_not_fit_into_one_buffer_leaves_its_rest_to_others() {
        let Ok(emulator) = Emulator::new(64 << 20, 1) else { return };
        let emulator = Arc::new(emulator);
        let mut allocator = WeightAllocator::new(&(emulator.clone() as Arc<dyn Driver>), 4096).unwrap();
        let first = allocator.place(1000).unwrap();
        let large = allocator.place(20 << 20).unwrap();
        assert!(!(first..first + 4096).contains(&large));
        let taken = emulator.allocated_bytes().0;
        assert_eq!([allocator.place(2048).unwrap(), allocator.place(1).unwrap()], [first + 1024, first + 3072]);
        assert_eq!(emulator.allocated_bytes().0, taken);
    }
}
