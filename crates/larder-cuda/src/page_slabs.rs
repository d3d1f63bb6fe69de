//! Memory of large pages, such as recurrent states: several of one size are allocated together, because a driver may
//! round each allocation up to 2 MiB, which nearly doubles a page that is a little larger than that.

use std::collections::HashMap;
use std::sync::Arc;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::DeviceBuffer;

/// Pages of a slab.
const SLAB_PAGES: usize = 8;
/// The least bytes of a page in a slab. The driver packs smaller ones itself.
const LEAST_BYTES: usize = 1 << 20;
/// Alignment of pages, in bytes.
const ALIGN: usize = 256;

/// Memory of a page, alone or in a slab.
#[derive(Clone)]
pub struct PageMemory {
    slab: Arc<DeviceBuffer>,
    offset: usize,
}

impl PageMemory {
    /// The address.
    pub fn at(&self) -> u64 {
        self.slab.at() + self.offset as u64
    }
}

/// Places of slabs that no page has, by the bytes of a place.
#[derive(Default)]
pub struct PageSlabs(HashMap<usize, Vec<PageMemory>>);

impl PageSlabs {
    /// Memory for a page of `bytes` bytes.
    pub fn allocate(&mut self, driver: &Arc<dyn Driver>, bytes: usize) -> Result<PageMemory> {
        if bytes < LEAST_BYTES {
            return Ok(PageMemory { slab: Arc::new(DeviceBuffer::of(driver, bytes)?), offset: 0 });
        }
        let place = bytes.next_multiple_of(ALIGN);
        let free = self.0.entry(place).or_default();
        if let Some(memory) = free.pop() {
            return Ok(memory);
        }
        let slab = match DeviceBuffer::of(driver, SLAB_PAGES * place) {
            Ok(slab) => Arc::new(slab),
            // Room for one page may be left.
            Err(_) => return Ok(PageMemory { slab: Arc::new(DeviceBuffer::of(driver, bytes)?), offset: 0 }),
        };
        free.extend((1..SLAB_PAGES).rev().map(|i| PageMemory { slab: slab.clone(), offset: i * place }));
        Ok(PageMemory { slab, offset: 0 })
    }

    /// Takes back the memory of a page of `bytes` bytes. What is returned is to be dropped without a lock, because that
    /// waits for launches.
    #[must_use]
    pub fn free(&mut self, memory: PageMemory, bytes: usize) -> Vec<PageMemory> {
        let Some(free) = self.0.get_mut(&bytes.next_multiple_of(ALIGN)).filter(|_| bytes >= LEAST_BYTES) else {
            return vec![memory];
        };
        let slab = memory.slab.clone();
        free.push(memory);
        let of_slab = |memory: &PageMemory| Arc::ptr_eq(&memory.slab, &slab);
        let all = free.iter().filter(|memory| of_slab(memory)).count();
        // Nothing else has the slab: these, and the clone here.
        if Arc::strong_count(&slab) == all + 1 {
            free.extract_if(.., |memory| of_slab(memory)).collect()
        } else {
            Vec::new()
        }
    }
}

#[cfg(all(test, feature = "emulator"))]
mod tests {
    use super::*;
    use crate::emulator::Emulator;

    #[test]
    fn large_pages_share_slabs_that_are_given_back_as_a_whole() {
        let Ok(emulator) = Emulator::new(64 << 20, 1) else { return };
        let emulator = Arc::new(emulator);
        let driver: Arc<dyn Driver> = emulator.clone();
        let allocated = || emulator.allocated_bytes().0;
        let (mut slabs, bytes) = (PageSlabs::default(), (2 << 20) + 4);
        let mut pages: Vec<PageMemory> = (0..9).map(|_| slabs.allocate(&driver, bytes).unwrap()).collect();
        let mut addresses: Vec<u64> = pages.iter().map(PageMemory::at).collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= bytes as u64));
        assert_eq!(allocated(), 16 * ((2 << 20) + 256), "two slabs");
        let last = pages.pop().unwrap();
        assert_eq!(slabs.free(last, bytes).len(), 8, "the second slab");
        assert_eq!(allocated(), 8 * ((2 << 20) + 256));
        let again = slabs.allocate(&driver, 100).unwrap();
        assert!(slabs.free(pages.pop().unwrap(), bytes).is_empty());
        assert_eq!(slabs.free(again, 100).len(), 1, "a small page has memory of its own");
        // Where a slab does not fit, a page may.
        let large: Vec<PageMemory> = (0..2).map(|_| slabs.allocate(&driver, 20 << 20).unwrap()).collect();
        assert!(slabs.allocate(&driver, 20 << 20).is_err());
        large.into_iter().for_each(|page| drop(slabs.free(page, 20 << 20)));
        pages.into_iter().for_each(|page| drop(slabs.free(page, bytes)));
        assert_eq!(allocated(), 0);
    }
}
