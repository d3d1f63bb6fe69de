//! The memory that experts are read into: one anonymous mapping, divided into slots.
//!
//! The mapping is shared by handles that each own a disjoint part of it, which the borrow checker cannot express; hence
//! the `unsafe` in this file, which callers do not need.
#![allow(unsafe_code)]

use std::{
    io,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    sync::Arc,
};

use larder_core::SHARD_ALIGN;
use parking_lot::Mutex;

use system::AnonymousMemory;

use super::touch::{TouchPace, Touched, Toucher};

#[cfg(unix)]
mod unix;
#[cfg(unix)]
use unix as system;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as system;

/// Bytes of a huge page, and the alignment of the first slot.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Largest slot in bytes; the kernel neither reads much more at a time nor registers longer buffers.
pub(super) const SLOT_BYTES_MAX: usize = 1 << 30;

/// The mapping that holds all slots. It gives no access to bytes; those belong to the slots.
#[derive(Clone)]
pub struct Arena {
    map: Arc<Mapping>,
    first: NonNull<u8>,
    /// Offset of each slot from the first, ascending, and the end of the last.
    starts: Arc<[usize]>,
}

/// The memory of an arena, and the thread that touches it ahead of the reads.
struct Mapping {
    /// Declared before `_map`, and so dropped before it: the thread has ended when the memory is unmapped.
    toucher: Mutex<Option<Toucher>>,
    _map: AnonymousMemory,
}

// SAFETY: `first` is only used to compute addresses; the bytes behind it are accessed only through slots.
unsafe impl Send for Arena {}
// SAFETY: as above, and `AnonymousMemory` is `Sync`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `slots` slots of `slot_bytes` zero bytes each, as [`with_sizes`](Self::with_sizes) does.
    pub fn new(slots: usize, slot_bytes: usize) -> io::Result<(Arena, Vec<Slot>)> {
        // Before memory for a list of the sizes is taken.
        slots.checked_mul(slot_bytes.max(SHARD_ALIGN)).filter(|b| *b <= isize::MAX as usize).ok_or_else(too_many)?;
        Self::with_sizes(&vec![slot_bytes; slots])
    }

    /// Maps a slot of zero bytes for each of `sizes`, and returns the only handle to each, in order.
    ///
    /// Sizes must be multiples of [`SHARD_ALIGN`] and at most 1 GiB. The system provides memory when it is first
    /// touched.
    pub fn with_sizes(sizes: &[usize]) -> io::Result<(Arena, Vec<Slot>)> {
        let mut starts = Vec::with_capacity(sizes.len() + 1);
        let mut end = 0usize;
        for bytes in sizes {
            check_size(*bytes)?;
            starts.push(end);
            end = end.checked_add(*bytes).ok_or_else(too_many)?;
        }
        starts.push(end);
        let bytes = end.checked_add(HUGE_PAGE_BYTES).filter(|b| isize::try_from(*b).is_ok()).ok_or_else(too_many)?;
        let map = AnonymousMemory::map(bytes)?;
        // SAFETY: the offset is less than the bytes of a huge page, which the mapping has beyond the slots.
        let first = unsafe { map.start().add(map.start().align_offset(HUGE_PAGE_BYTES)) };
        let map = Arc::new(Mapping { toucher: Mutex::new(None), _map: map });
        let arena = Arena { map, first, starts: starts.into() };
        arena.use_huge_pages_if(|_| true);
        let slots = (0..sizes.len()).map(|index| arena.slot(index)).collect();
        Ok((arena, slots))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.starts.len() - 1
    }

    /// Bytes of all slots together.
    pub fn bytes(&self) -> usize {
        self.starts[self.slots()]
    }

    /// The address range of all slots.
    pub fn range(&self) -> Range<usize> {
        let first = self.first.as_ptr() as usize;
        first..first + self.bytes()
    }

    /// The address ranges of those slots that are wanted, ascending; adjacent ones are one range.
    pub fn ranges_of(&self, wanted: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
        let first = self.range().start;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for slot in (0..self.slots()).filter(|slot| wanted(*slot)) {
            let (start, end) = (first + self.starts[slot], first + self.starts[slot + 1]);
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => ranges.push(start..end),
            }
        }
        ranges
    }

    /// Requests huge pages, which save TLB misses, where they lie within slots that `wanted` allows, and small ones
    /// elsewhere: the first byte that is touched of a huge page takes memory for all of it. Without huge pages the
    /// slots work the same.
    pub fn use_huge_pages_if(&self, wanted: impl Fn(usize) -> bool) {
        system::advise_huge_pages(self.range(), false);
        for slots in self.ranges_of(wanted) {
            let start = slots.start.next_multiple_of(HUGE_PAGE_BYTES);
            system::advise_huge_pages(start..slots.end / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, true);
        }
    }

    /// Starts a thread that touches the slots in order, so that reads need not wait until the system has cleared their
    /// memory. It ends when all is touched, when the system refuses, or when the last slot and handle of the arena are
    /// dropped. Slots can be used meanwhile. A later call ends the touching of the one before; systems without the call
    /// (Linux before 5.14, others) touch memory when it is first used.
    pub fn touch_ahead(&self, pace: TouchPace) {
        self.touch_ahead_if(pace, |_| true);
    }

    /// As [`touch_ahead`](Self::touch_ahead), of those slots alone that `wanted` allows.
    pub fn touch_ahead_if(&self, pace: TouchPace, wanted: impl Fn(usize) -> bool) {
        if self.bytes() == 0 {
            return;
        }
        let mut current = self.map.toucher.lock();
        // The thread of an earlier call has ended when the new one begins.
        *current = None;
        let ranges: Vec<Range<usize>> = self.starts.windows(2).map(|slot| slot[0]..slot[1]).collect();
        let wanted: Vec<bool> = (0..ranges.len()).map(wanted).collect();
        let first = self.first.as_ptr() as usize;
        let touch = move |at: usize, bytes: usize| {
            let slots = ranges.partition_point(|slot| slot.end <= at)..ranges.len();
            for slot in slots.take_while(|slot| ranges[*slot].start < at + bytes).filter(|slot| wanted[*slot]) {
                let (start, end) = (ranges[slot].start.max(at), ranges[slot].end.min(at + bytes));
                // SAFETY: the bytes are within a slot; the mapping outlives the thread, because `Mapping` drops the
                // `Toucher`, which joins it, before it unmaps the memory.
                unsafe { system::populate(first + start, end - start)? };
            }
            Ok(())
        };
        *current = Toucher::start(self.bytes(), pace, touch).ok();
    }

    /// Ends the touching of [`touch_ahead`](Self::touch_ahead), and waits for what is being touched: memory that is
    /// given back afterwards is not touched again.
    pub fn stop_touching(&self) {
        self.map.toucher.lock().iter().for_each(Toucher::stop);
    }

    /// Tells the thread of [`touch_ahead`](Self::touch_ahead) that reads have reached a slot.
    pub fn reads_reached(&self, slot: usize) {
        if let (Some(toucher), Some(end)) = (&*self.map.toucher.lock(), self.starts.get(slot.saturating_add(1))) {
            toucher.reads_reached(*end as u64);
        }
    }

    /// What the thread of [`touch_ahead`](Self::touch_ahead) has touched so far.
    pub fn touched(&self) -> Touched {
        self.map.toucher.lock().as_ref().map(Toucher::touched).unwrap_or_default()
    }

    /// Touches all slots and waits until that is done. Fails where the system has no such call, or no memory.
    pub fn touch(&self) -> io::Result<()> {
        // SAFETY: the slots are mapped while `self` lives.
        unsafe { system::populate(self.range().start, self.bytes()) }
    }

    /// Address and length of a slot.
    pub(super) fn slot_memory(&self, index: usize) -> (NonNull<u8>, usize) {
        assert!(index < self.slots(), "the index must be that of a slot of the arena");
        let (start, end) = (self.starts[index], self.starts[index + 1]);
        // SAFETY: the mapping holds the bytes up to the end of the last slot behind `first`, checked in `with_sizes`.
        (unsafe { self.first.add(start) }, end - start)
    }

    /// Makes the handle of a slot. Called once per slot, only by `with_sizes`.
    fn slot(&self, index: usize) -> Slot {
        let (start, bytes) = self.slot_memory(index);
        Slot { map: self.map.clone(), start, bytes, index }
    }

    /// Whether no slot and no other handle to the arena exists.
    #[cfg(test)]
    pub(super) fn has_no_slots(&self) -> bool {
        Arc::strong_count(&self.map) == 1
    }

    /// The memory of all slots, once no handle to a slot exists.
    #[cfg(test)]
    pub(super) fn total_slots(&self) -> &[u8] {
        assert!(self.has_no_slots(), "no handle to a slot may be left");
        // SAFETY: within the mapping, as in `slot_memory`; no slot is left that could write to it.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.bytes()) }
    }
}

fn check_size(slot_bytes: usize) -> io::Result<()> {
    if slot_bytes == 0 || !slot_bytes.is_multiple_of(SHARD_ALIGN) {
        return Err(invalid(format!(
            "a slot of {slot_bytes} bytes is invalid: its length must be a multiple of {SHARD_ALIGN}"
        )));
    }
    if slot_bytes > SLOT_BYTES_MAX {
        return Err(invalid(format!("a slot of {slot_bytes} bytes is too large: the limit is {SLOT_BYTES_MAX}")));
    }
    Ok(())
}

fn too_many() -> io::Error {
    invalid("the slots exceed the address space".into())
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// The only handle to the bytes of one slot, or of a part of one. Their address is fixed while the handle lives, also
/// when the handle moves.
pub struct Slot {
    map: Arc<Mapping>,
    start: NonNull<u8>,
    bytes: usize,
    index: usize,
}

// SAFETY: a slot is the only access to its bytes, so it can be sent like a `Vec<u8>`.
unsafe impl Send for Slot {}
// SAFETY: a shared slot gives only shared access to its bytes.
unsafe impl Sync for Slot {}

impl Slot {
    /// Index of this slot in its arena; parts have the index of their slot.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Splits it into its first `bytes` and the rest, for two reads that complete at different times. Each part is a
    /// slot with the same index, until [`Slot::join`] joins them.
    ///
    /// # Panics
    ///
    /// If `bytes` is not a multiple of [`SHARD_ALIGN`], or is larger than the slot.
    pub fn split_at(mut self, bytes: usize) -> (Slot, Slot) {
        // Reads fill whole pages, so the read of a part that ended within a page would write to the other part.
        assert!(bytes.is_multiple_of(SHARD_ALIGN), "a slot cannot be split at {bytes}, within a page");
        assert!(bytes <= self.bytes, "a slot of {} bytes cannot be split at {bytes}", self.bytes);
        // SAFETY: within the slot's bytes, or one past their end.
        let start = unsafe { self.start.add(bytes) };
        let rest = Slot { map: self.map.clone(), start, bytes: self.bytes - bytes, index: self.index };
        self.bytes = bytes;
        (self, rest)
    }

    /// Joins the two parts of [`Slot::split_at`].
    ///
    /// # Panics
    ///
    /// If they are not the two parts of one split, in order.
    pub fn join(mut self, rest: Slot) -> Slot {
        assert!(Arc::ptr_eq(&self.map, &rest.map) && self.index == rest.index, "both must be parts of one slot");
        assert_eq!(self.as_ptr_range().end, rest.as_ptr(), "one part must begin where the other ends");
        self.bytes += rest.bytes;
        self
    }

    /// Gives its memory back to the system, locked or not; the bytes are zero then, and the system provides memory
    /// again when they are next used.
    pub fn give_back(&mut self) -> io::Result<()> {
        let (start, bytes) = (self.start.as_ptr(), self.bytes);
        // SAFETY: this handle is the only access to the bytes, and it is borrowed exclusively; the memory is anonymous
        // and private, so that it stays mapped and reads as zeros. Locked memory cannot be given back.
        unsafe { system::give_back(start, bytes) }
    }

    /// Locks its memory, so that the system does not swap it out. What is not provided yet is locked when it is first
    /// used.
    pub fn lock(&mut self) -> io::Result<()> {
        // SAFETY: the slot is mapped; locking neither reads nor changes its bytes.
        unsafe { system::lock(self.start.as_ptr().cast(), self.bytes) }
    }

    /// Keeps the memory of its arena mapped, also when every slot and handle of the arena has been dropped.
    pub fn keep_mapped(&self) -> KeptMapping {
        KeptMapping { _map: self.map.clone() }
    }

    /// Whether it is a slot of `arena`.
    pub fn belongs_to(&self, arena: &Arena) -> bool {
        Arc::ptr_eq(&self.map, &arena.map)
    }
}

/// Keeps the memory of an arena mapped, so that nothing else gets its addresses. It gives no access to bytes.
pub struct KeptMapping {
    _map: Arc<Mapping>,
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped and initialised while `map` lives, and no other slot overlaps them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and this handle is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

/// Pages of a slot that the system provides memory for.
#[cfg(all(test, target_os = "linux"))]
fn resident_pages(slot: &mut Slot) -> usize {
    let mut pages = vec![0u8; slot.len() / SHARD_ALIGN];
    // SAFETY: the slot is mapped, and there is a byte for each of its pages.
    let done = unsafe { libc::mincore(slot.as_mut_ptr().cast(), slot.len(), pages.as_mut_ptr()) };
    assert_eq!(done, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[cfg(test)]
mod tests;
