//! The main memory that copies use: slots themselves where they can be page-locked, else a few page-locked staging buffers.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use larder_cache::two_tiers::{Direction, Transfer};
use larder_store::reader::{KeptMapping, Slot};

use crate::driver::Driver;
use crate::error::Result;
use crate::memory::PinnedBuffer;

/// Staging buffers, and so copies in flight, where slots cannot be page-locked: two per direction.
const BUFFERS: usize = 4;

/// How copies access slots in main memory. Displays as a sentence.
#[derive(Clone, Default)]
pub struct CopyMode(Arc<OnceLock<String>>);

impl fmt::Display for CopyMode {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0.get() {
            None => f.write_str("slots in memory are page-locked and copied directly"),
            Some(cause) => write!(
                f,
                "slots in memory cannot be page-locked ({cause}), so copies go through {BUFFERS} staging buffers"
            ),
        }
    }
}

/// The main memory from or to which the driver copies.
pub enum CopyPath {
    /// The slot itself.
    Direct,
    /// A staging buffer.
    Staged(PinnedBuffer),
}

impl CopyPath {
    /// The address for the driver.
    pub fn address(&mut self, transfer: &mut Transfer) -> *mut u8 {
        match self {
            CopyPath::Direct => transfer.slot.as_mut_ptr(),
            CopyPath::Staged(buffer) => buffer.as_mut_ptr(),
        }
    }

    /// Before a copy to the device: fills the staging buffer, if there is one.
    pub fn fill(&mut self, transfer: &Transfer) {
        if let CopyPath::Staged(buffer) = self {
            buffer[..transfer.len].copy_from_slice(&transfer.slot[..transfer.len]);
        }
    }

    /// After a copy from the device: empties the staging buffer, if there is one, into the slot.
    pub fn empty(&self, transfer: &mut Transfer) {
        if let (Direction::FromDevice, CopyPath::Staged(buffer)) = (transfer.direction, self) {
            transfer.slot[..transfer.len].copy_from_slice(&buffer[..transfer.len]);
        }
    }
}

/// Slots that were page-locked on first use, and staging buffers for all others.
pub struct PageLockedSlots {
    driver: Arc<dyn Driver>,
    mode: CopyMode,
    slot_bytes: usize,
    /// Page-locked slots by address.
    slots: HashMap<usize, LockedSlot>,
    /// Staging buffers that are free.
    buffers: Vec<PinnedBuffer>,
    /// Staging buffers allocated so far.
    made: usize,
}

/// A page-locked slot. Its memory stays mapped: the driver would go on copying from and to the old pages if another slot
/// were mapped at the address.
struct LockedSlot {
    /// Length of the slot when it was page-locked.
    bytes: usize,
    _memory: KeptMapping,
}

impl PageLockedSlots {
    pub fn new(driver: &Arc<dyn Driver>, mode: CopyMode) -> Self {
        let (slots, buffers) = (HashMap::new(), Vec::new());
        PageLockedSlots { driver: driver.clone(), mode, slot_bytes: 0, slots, buffers, made: 0 }
    }

    /// Sets the length of the longest copy.
    pub fn set_slot_bytes(&mut self, bytes: usize) {
        self.slot_bytes = bytes;
    }

    /// The memory for a copy; `None` if it has to wait for a staging buffer.
    pub fn path(&mut self, transfer: &Transfer) -> Result<Option<CopyPath>> {
        if self.is_locked(&transfer.slot, transfer.len) {
            return Ok(Some(CopyPath::Direct));
        }
        if self.buffers.is_empty() && self.made < BUFFERS {
            self.buffers.push(PinnedBuffer::of(&self.driver, self.slot_bytes)?);
            self.made += 1;
        }
        Ok(self.buffers.pop().map(CopyPath::Staged))
    }

    /// Takes back the staging buffer of a copy that has ended.
    pub fn give_back(&mut self, path: CopyPath) {
        if let CopyPath::Staged(buffer) = path {
            self.buffers.push(buffer);
        }
    }

    fn is_locked(&mut self, slot: &Slot, len: usize) -> bool {
        let (from, bytes) = (slot.as_ptr(), slot.len());
        if let Some(locked) = self.slots.get(&(from as usize)) {
            return locked.bytes >= len;
        }
        if self.mode.0.get().is_some() {
            return false;
        }
        // SAFETY: the slot is mapped, and stays so until it is unregistered.
        match unsafe { self.driver.register(from, bytes) } {
            Ok(()) => {
                self.slots.insert(from as usize, LockedSlot { bytes, _memory: slot.keep_mapped() });
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
