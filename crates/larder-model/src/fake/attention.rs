//! A fake device that has pages of KV caches and states.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{DeviceAttention, KvPageShape};
use crate::error::{ModelError, Result};
use crate::ops::CpuPages;

/// Fake of [`DeviceAttention`]: pages in main memory, of which there is as much as it says.
#[derive(Default)]
pub struct FakeAttention {
    total_bytes: usize,
    /// Every n-th attention call fails; 0 for none.
    failing: u64,
    /// Every n-th allocation fails; 0 for none.
    refusing: u64,
    pages: Arc<CpuPages>,
    state: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    shapes: HashMap<usize, KvPageShape>,
    used_bytes: usize,
    calls: u64,
    copies: u64,
    allocations: u64,
}

impl FakeAttention {
    /// A device with `total_bytes` of memory that does not fail.
    pub fn new(total_bytes: usize) -> Self {
        FakeAttention { total_bytes, ..FakeAttention::default() }
    }

    /// Every n-th attention call fails.
    pub fn failing(mut self, every: u64) -> Self {
        self.failing = every;
        self
    }

    /// Every n-th allocation fails.
    pub fn refusing(mut self, every: u64) -> Self {
        self.refusing = every;
        self
    }

    /// Bytes of all allocated pages.
    pub fn used_bytes(&self) -> usize {
        self.state.lock().used_bytes
    }

    /// Number of attention calls so far.
    pub fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// Number of copies between pages so far.
    pub fn copies(&self) -> u64 {
        self.state.lock().copies
    }

    /// The pages.
    pub(crate) fn pages(&self) -> &Arc<CpuPages> {
        &self.pages
    }

    /// Counts a call of attention, which may fail.
    pub(crate) fn attend(&self) -> Result<()> {
        let mut state = self.state.lock();
        state.calls += 1;
        if self.failing > 0 && state.calls.is_multiple_of(self.failing) {
            Err(ModelError::Device("attention on the device failed: device lost".into()))
        } else {
            Ok(())
        }
    }
}

impl DeviceAttention for FakeAttention {
    fn allocate(&self, shape: KvPageShape) -> Result<usize> {
        let mut state = self.state.lock();
        state.allocations += 1;
        if self.refusing > 0 && state.allocations.is_multiple_of(self.refusing) {
            return Err(ModelError::Device("the device has no memory for a page now".into()));
        }
        let (size, free) = (shape.bytes(), self.total_bytes - state.used_bytes);
        if size > free {
            let message = format!("a KV page of {size} bytes does not fit into the {free} free bytes of the device");
            return Err(ModelError::Device(message.into()));
        }
        let id = self.pages.allocate(shape)?;
        state.used_bytes += size;
        state.shapes.insert(id, shape);
        // As floats these bytes are NaN, so a read of unwritten rows shows.
        self.pages.lock().page_mut(id).bytes_mut().fill(0xFF);
        Ok(id)
    }

    fn free(&self, page: usize) {
        let mut state = self.state.lock();
        state.used_bytes -= state.shapes.remove(&page).expect("the page is allocated").bytes();
        self.pages.free(page);
    }

    fn append(&self, page: usize, at: usize, bytes: &[u8]) -> Result<()> {
        self.pages.append(page, at, bytes)
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        self.state.lock().copies += 1;
        self.pages.copy(from, to, len)
    }

    fn read(&self, page: usize, out: &mut [u8]) -> Result<()> {
        self.pages.read(page, out)
    }
}
