//! The main memory that copies use: slots themselves where they can be page-locked, else a few page-locked staging
//! buffers.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use larder_cache::two_tiers::{Direction, Transfer};
use larder_store::reader::{KeptMapping, Slot};
use parking_lot::{Condvar, Mutex};

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

/// Page-locked slots, and staging buffers for all others. Slots are locked by a thread of their own, or when they are
/// first used.
pub struct PageLockedSlots {
    driver: Arc<dyn Driver>,
    mode: CopyMode,
    slot_bytes: usize,
    locked: Arc<LockedSlots>,
    /// The slots that a thread will lock.
    expected: Vec<SlotMemory>,
    thread: Option<JoinHandle<()>>,
    /// Staging buffers that are free.
    buffers: Vec<PinnedBuffer>,
    /// Staging buffers allocated so far.
    made: usize,
}

/// The slots that are page-locked.
#[derive(Default)]
struct LockedSlots {
    /// By address; `None` while it is being locked.
    slots: Mutex<HashMap<usize, Option<LockedSlot>>>,
    /// A slot is locked, or cannot be.
    is_done: Condvar,
    /// Whether no more are locked in the background.
    is_over: AtomicBool,
}

/// A page-locked slot. Its memory stays mapped: the driver would go on copying from and to the old pages if another
/// slot were mapped at the address.
struct LockedSlot {
    /// Length of the slot when it was page-locked.
    bytes: usize,
    _memory: KeptMapping,
}

/// Memory of a slot that is to be page-locked.
struct SlotMemory {
    from: *const u8,
    bytes: usize,
    memory: KeptMapping,
}

// SAFETY: the address is only handed to the driver, and the memory stays mapped.
unsafe impl Send for SlotMemory {}

impl SlotMemory {
    fn of(slot: &Slot) -> Self {
        SlotMemory { from: slot.as_ptr(), bytes: slot.len(), memory: slot.keep_mapped() }
    }
}

impl LockedSlots {
    /// Whether the first `len` bytes of a slot are page-locked, which is tried unless it has failed before. Waits for
    /// no other slot.
    fn lock(&self, slot: SlotMemory, len: usize, driver: &Arc<dyn Driver>, mode: &CopyMode) -> bool {
        let SlotMemory { from, bytes, memory } = slot;
        let mut slots = self.slots.lock();
        while let Some(known) = slots.get(&(from as usize)) {
            match known {
                Some(locked) => return locked.bytes >= len,
                None => self.is_done.wait(&mut slots),
            }
        }
        if mode.0.get().is_some() {
            return false;
        }
        slots.insert(from as usize, None);
        drop(slots);
        // SAFETY: the slot is mapped, and stays so until it is unregistered.
        let locked = unsafe { driver.register(from, bytes) };
        let mut slots = self.slots.lock();
        match &locked {
            Ok(()) => drop(slots.insert(from as usize, Some(LockedSlot { bytes, _memory: memory }))),
            Err(e) => {
                slots.remove(&(from as usize));
                let _ = mode.0.set(e.to_string());
            }
        }
        self.is_done.notify_all();
        locked.is_ok()
    }
}

impl PageLockedSlots {
    pub fn new(driver: &Arc<dyn Driver>, mode: CopyMode) -> Self {
        PageLockedSlots {
            driver: driver.clone(),
            mode,
            slot_bytes: 0,
            locked: Arc::default(),
            expected: Vec::new(),
            thread: None,
            buffers: Vec::new(),
            made: 0,
        }
    }

    /// Sets the length of the longest copy.
    pub fn set_slot_bytes(&mut self, bytes: usize) {
        self.slot_bytes = bytes;
    }

    /// These slots will be copied.
    pub fn expect(&mut self, slots: &[Slot]) {
        self.expected = slots.iter().map(SlotMemory::of).collect();
    }

    /// Locks the expected slots one after another, on a thread of its own, until one fails.
    pub fn lock_in_background(&mut self) {
        let slots = std::mem::take(&mut self.expected);
        let (locked, driver, mode) = (self.locked.clone(), self.driver.clone(), self.mode.clone());
        let lock_all = move || {
            for slot in slots {
                let len = slot.bytes;
                if locked.is_over.load(Ordering::Relaxed) || !locked.lock(slot, len, &driver, &mode) {
                    return;
                }
            }
        };
        // Without a thread they are locked when they are used.
        self.thread = thread::Builder::new().name("page-locking".into()).spawn(lock_all).ok();
    }

    /// The memory for a copy; `None` if it has to wait for a staging buffer.
    pub fn path(&mut self, transfer: &Transfer) -> Result<Option<CopyPath>> {
        let slot = SlotMemory::of(&transfer.slot);
        if self.locked.lock(slot, transfer.len, &self.driver, &self.mode) {
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
}

impl Drop for PageLockedSlots {
    fn drop(&mut self) {
        self.locked.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
        for from in self.locked.slots.lock().keys() {
            // SAFETY: it was registered, and the link has waited for all copies.
            unsafe { self.driver.unregister(*from as *const u8) };
        }
    }
}
