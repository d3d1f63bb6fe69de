//! Which memory copies use here: the slots themselves where they can be page-locked, else a few buffers that are.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use larder_cache::tiers::{Direction, Transfer};
use larder_store::reader::Slot;

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::PinnedBuffer;

/// As many copies can be under way where slots cannot be page-locked: two each way.
const BUFFERS: usize = 4;

/// CopyMode copies find their bytes, as a sentence.
#[derive(Clone, Default)]
pub struct CopyMode(Arc<OnceLock<String>>);

impl fmt::Display for CopyMode {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0.get() {
            None => f.write_str("slots in memory are page-locked and copied straight"),
            Some(cause) => write!(
                f,
                "slots in memory cannot be page-locked ({cause}), so copies go through {BUFFERS} buffers that are"
            ),
        }
    }
}

/// Where a copy's bytes are here.
pub enum CopyPath {
    /// In the slot itself.
    Direct,
    /// In a buffer.
    Staged(PinnedBuffer),
}

impl CopyPath {
    /// Where a copy's bytes are.
    pub fn address(&mut self, transfer: &mut Transfer) -> *mut u8 {
        match self {
            CopyPath::Direct => transfer.slot.as_mut_ptr(),
            CopyPath::Staged(buffer) => buffer.as_mut_ptr(),
        }
    }

    /// Before a copy in: brings the bytes to where it takes them from.
    pub fn fill(&mut self, transfer: &Transfer) {
        if let CopyPath::Staged(buffer) = self {
            buffer[..transfer.len].copy_from_slice(&transfer.slot[..transfer.len]);
        }
    }

    /// After a copy: brings the bytes from where it put them, if it was one out.
    pub fn empty(&self, transfer: &mut Transfer) {
        if let (Direction::FromDevice, CopyPath::Staged(buffer)) = (transfer.direction, self) {
            transfer.slot[..transfer.len].copy_from_slice(&buffer[..transfer.len]);
        }
    }
}

/// Slots that were page-locked when they were first used, and buffers for the others.
pub struct PageLockedSlots {
    driver: Arc<dyn Driver>,
    mode: CopyMode,
    slot_bytes: usize,
    /// By where they begin: how long they were then.
    slots: HashMap<usize, usize>,
    /// Buffers that nobody uses.
    buffers: Vec<PinnedBuffer>,
    /// Buffers there are.
    made: usize,
}

impl PageLockedSlots {
    pub fn new(driver: &Arc<dyn Driver>, mode: CopyMode) -> Self {
        let (slots, buffers) = (HashMap::new(), Vec::new());
        PageLockedSlots { driver: driver.clone(), mode, slot_bytes: 0, slots, buffers, made: 0 }
    }

    /// The length of the longest copy.
    pub fn set_slot_bytes(&mut self, bytes: usize) {
        self.slot_bytes = bytes;
    }

    /// The way of a copy; `None` if it has to wait for a buffer.
    pub fn way(&mut self, transfer: &Transfer) -> Result<Option<CopyPath>> {
        if self.is_locked(&transfer.slot, transfer.len) {
            return Ok(Some(CopyPath::Direct));
        }
        if self.buffers.is_empty() && self.made < BUFFERS {
            self.buffers.push(PinnedBuffer::of(&self.driver, self.slot_bytes)?);
            self.made += 1;
        }
        Ok(self.buffers.pop().map(CopyPath::Staged))
    }

    /// A copy is over.
    pub fn give_back(&mut self, way: CopyPath) {
        if let CopyPath::Staged(buffer) = way {
            self.buffers.push(buffer);
        }
    }

    fn is_locked(&mut self, slot: &Slot, len: usize) -> bool {
        let (from, bytes) = (slot.as_ptr(), slot.len());
        if let Some(locked) = self.slots.get(&(from as usize)) {
            return *locked >= len;
        }
        if self.mode.0.get().is_some() {
            return false;
        }
        // SAFETY: whoever hands in slots keeps them mapped, see `GpuLink`.
        match unsafe { self.driver.register(from, bytes) } {
            Ok(()) => {
                self.slots.insert(from as usize, bytes);
                true
            }
            Err(e) => {
                let _ = self.mode.0.set(e.to_string());
                false
            }
        }
    }
}

impl Drop for PageLockedSlots {
    fn drop(&mut self) {
        for from in self.slots.keys() {
            // SAFETY: it was registered, and the link has waited for all copies.
            unsafe { self.driver.unregister(*from as *const u8) };
        }
    }
}
