//! The memory that experts are read into: one anonymous mapping, divided into slots.
//!
//! The mapping is shared by handles that each own a disjoint part of it, which the borrow checker cannot express; hence
//! the `unsafe` in this file, which callers do not need.
#![allow(unsafe_code)]

use std::{
    io,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use larder_core::SHARD_ALIGN;
use memmap2::MmapMut;

use super::touch::{TouchPace, Touched, Toucher};

/// Alignment of the first slot in bytes: a huge page.
const ARENA_ALIGN: usize = 2 << 20;
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
    toucher: OnceLock<Toucher>,
    _map: MmapMut,
}

// SAFETY: `first` is only used to compute addresses; the bytes behind it are accessed only through slots.
unsafe impl Send for Arena {}
// SAFETY: as above, and `MmapMut` is `Sync`.
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
    /// Sizes must be multiples of [`SHARD_ALIGN`] and at most 1 GiB. The system provides memory when it is first touched.
    pub fn with_sizes(sizes: &[usize]) -> io::Result<(Arena, Vec<Slot>)> {
        let mut starts = Vec::with_capacity(sizes.len() + 1);
        let mut end = 0usize;
        for bytes in sizes {
            check_size(*bytes)?;
            starts.push(end);
            end = end.checked_add(*bytes).ok_or_else(too_many)?;
        }
        starts.push(end);
        let bytes = end.checked_add(ARENA_ALIGN).filter(|b| isize::try_from(*b).is_ok()).ok_or_else(too_many)?;
        let mut map = MmapMut::map_anon(bytes)?;
        ask_for_huge_pages(&map);
        let before = map.as_ptr().align_offset(ARENA_ALIGN);
        let first = NonNull::from(&mut map[before..]).cast::<u8>();
        let arena =
            Arena { map: Arc::new(Mapping { toucher: OnceLock::new(), _map: map }), first, starts: starts.into() };
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

    /// Starts a thread that touches the slots in order, so that reads need not wait until the system has cleared their
    /// memory. It ends when all is touched, when the system refuses, or when the last slot and handle of the arena are
    /// dropped. Slots can be used meanwhile. Only the first call has an effect; systems without the call (Linux before
    /// 5.14, others) touch memory when it is first used.
    pub fn touch_ahead(&self, pace: TouchPace) {
        if self.bytes() == 0 || self.map.toucher.get().is_some() {
            return;
        }
        let first = self.first.as_ptr() as usize;
        // SAFETY: the bytes from `at` on, `bytes` of them, are within the slots; the mapping outlives the thread, because
        // `Mapping` drops the `Toucher`, which joins it, before it unmaps the memory.
        let touch = move |at, bytes| unsafe { populate(first + at, bytes) };
        if let Ok(toucher) = Toucher::start(self.bytes(), pace, touch) {
            // If another call was faster, its thread goes on and this one ends.
            let _ = self.map.toucher.set(toucher);
        }
    }

    /// Tells the thread of [`touch_ahead`](Self::touch_ahead) that reads have reached a slot.
    pub fn reads_reached(&self, slot: usize) {
        if let (Some(toucher), Some(end)) = (self.map.toucher.get(), self.starts.get(slot.saturating_add(1))) {
            toucher.reads_reached(*end as u64);
        }
    }

    /// What the thread of [`touch_ahead`](Self::touch_ahead) has touched so far.
    pub fn touched(&self) -> Touched {
        self.map.toucher.get().map(Toucher::touched).unwrap_or_default()
    }

    /// Touches all slots and waits until that is done. Fails where the system has no such call, or no memory.
    pub fn touch(&self) -> io::Result<()> {
        // SAFETY: the slots are mapped while `self` lives.
        unsafe { populate(self.range().start, self.bytes()) }
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

    /// Whether it is a slot of `arena`.
    pub fn belongs_to(&self, arena: &Arena) -> bool {
        Arc::ptr_eq(&self.map, &arena.map)
    }
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

/// Makes the system provide the pages of a range. Their bytes do not change, also if the kernel or a thread writes to them
/// at the same time.
///
/// # Safety
///
/// The range must be mapped and stay so during the call, by nothing but a writable private mapping.
#[cfg(any(target_os = "linux", target_os = "android"))]
unsafe fn populate(address: usize, bytes: usize) -> io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: by the contract of this function; the advice neither frees memory nor changes what is in it.
    unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPopulateWrite) }.map_err(io::Error::from)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
unsafe fn populate(_: usize, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Requests huge pages, which save TLB misses. Without them the slots work the same.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(map: &MmapMut) {
    let _ = map.advise(memmap2::Advice::HugePage);
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: &MmapMut) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_aligned_zeroed_disjoint_and_have_fixed_addresses() {
        let (arena, mut slots) = Arena::new(5, 12 << 10).unwrap();
        assert_eq!(slots[0].as_ptr().align_offset(ARENA_ALIGN), 0);
        assert!(slots.iter().all(|s| s.len() == 12 << 10 && s.iter().all(|b| *b == 0) && s.belongs_to(&arena)));
        let addresses: Vec<_> = slots.iter().map(|s| s.as_ptr()).collect();
        slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
        slots.reverse();
        drop(arena);
        for slot in &slots {
            assert_eq!(slot.as_ptr(), addresses[slot.index()]);
            assert!(slot.iter().all(|b| *b == slot.index() as u8 + 1));
        }
    }

    #[test]
    fn slots_of_different_sizes_are_disjoint_and_in_order() {
        let sizes = [8192, 4096, 4096, 12 << 10];
        let (arena, mut slots) = Arena::with_sizes(&sizes).unwrap();
        assert_eq!((arena.slots(), arena.bytes()), (4, 28 << 10));
        slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
        let mut end = arena.range().start;
        for (i, (slot, bytes)) in slots.iter().zip(sizes).enumerate() {
            assert_eq!((slot.as_ptr() as usize, slot.len(), slot.index()), (end, bytes, i));
            assert!(slot.iter().all(|b| *b == i as u8 + 1));
            end += bytes;
        }
        assert_eq!(end, arena.range().end);
        for sizes in [&[4096, 0][..], &[4096, 100], &[SLOT_BYTES_MAX + SHARD_ALIGN]] {
            assert!(Arena::with_sizes(sizes).is_err(), "{sizes:?}");
        }
    }

    #[test]
    fn the_mapping_lives_as_long_as_any_slot() {
        let (arena, mut slots) = Arena::new(2, SHARD_ALIGN).unwrap();
        assert!(!arena.has_no_slots());
        slots.pop();
        assert!(!arena.has_no_slots());
        slots.pop();
        assert!(arena.has_no_slots());
    }

    #[test]
    fn touching_ahead_changes_no_byte_and_ends_with_the_arena() {
        for pace in [TouchPace::Background, TouchPace::AheadOfReads] {
            let (arena, mut slots) = Arena::new(64, 1 << 20).unwrap();
            arena.touch_ahead(pace);
            arena.touch_ahead(pace);
            // While the thread touches the same memory.
            slots.iter_mut().enumerate().for_each(|(i, slot)| slot.fill(i as u8 + 1));
            arena.reads_reached(63);
            arena.reads_reached(usize::MAX - 1);
            while arena.touched().bytes < 64 << 20 && arena.touch().is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            assert!(slots.iter().all(|slot| slot.iter().all(|b| *b == slot.index() as u8 + 1)));
            drop(slots);
            assert!(arena.has_no_slots(), "the thread holds no slot");
        }
        let (arena, slots) = Arena::new(0, 4096).unwrap();
        arena.touch_ahead(TouchPace::Background);
        assert_eq!((arena.touched(), slots.len()), (Touched::default(), 0));
    }

    #[test]
    fn an_arena_that_is_dropped_is_not_touched_to_its_end() {
        // Far more than any machine has.
        let Ok((arena, slots)) = Arena::new(1 << 16, SLOT_BYTES_MAX) else { return println!("no address space") };
        arena.touch_ahead(TouchPace::AheadOfReads);
        drop((arena, slots));
    }

    #[test]
    fn parts_of_a_slot_are_disjoint_and_can_be_joined() {
        let (arena, mut slots) = Arena::new(2, 12 << 10).unwrap();
        let slot = slots.remove(0);
        let whole = slot.as_ptr_range();
        let (mut front, back) = slot.split_at(SHARD_ALIGN);
        let (mut middle, mut back) = back.split_at(SHARD_ALIGN);
        front.fill(1);
        middle.fill(2);
        back.fill(3);
        assert!(
            [&front, &middle, &back].iter().all(|s| s.len() == SHARD_ALIGN && s.index() == 0 && s.belongs_to(&arena))
        );
        let slot = front.join(middle).join(back);
        assert_eq!(slot.as_ptr_range(), whole);
        assert!((0..slot.len()).all(|at| slot[at] == (at / SHARD_ALIGN) as u8 + 1));
        assert!(slots[0].iter().all(|b| *b == 0));
        let (front, back) = slot.split_at(12 << 10);
        assert!(back.is_empty() && front.join(back).len() == 12 << 10);
        drop(slots);
        assert!(arena.has_no_slots());
    }

    #[test]
    #[should_panic(expected = "split at 512, within a page")]
    fn a_part_must_be_whole_pages() {
        Arena::new(1, 8192).unwrap().1.remove(0).split_at(512);
    }

    #[test]
    #[should_panic(expected = "a slot of 8192 bytes cannot be split at 12288")]
    fn a_part_must_be_within_the_slot() {
        Arena::new(2, 8192).unwrap().1.remove(0).split_at(12288);
    }

    #[test]
    #[should_panic(expected = "parts of one slot")]
    fn adjacent_slots_cannot_be_joined() {
        let mut slots = Arena::new(2, SHARD_ALIGN).unwrap().1;
        let second = slots.remove(1);
        slots.remove(0).join(second);
    }

    #[test]
    #[should_panic(expected = "parts of one slot")]
    fn parts_of_different_arenas_cannot_be_joined() {
        let [a, b] = [(); 2].map(|()| Arena::new(1, 8192).unwrap().1.remove(0).split_at(SHARD_ALIGN));
        a.0.join(b.1);
    }

    #[test]
    #[should_panic(expected = "begin where the other ends")]
    fn parts_must_be_joined_in_order() {
        let (front, back) = Arena::new(1, 8192).unwrap().1.remove(0).split_at(SHARD_ALIGN);
        back.join(front);
    }

    #[test]
    fn invalid_sizes_are_refused() {
        assert!(Arena::new(1, 0).is_err());
        assert!(Arena::new(1, 4095).is_err());
        assert!(Arena::new(1, SLOT_BYTES_MAX + SHARD_ALIGN).is_err());
        assert!(Arena::new(usize::MAX / 4096, 8192).is_err());
        assert!(Arena::new(usize::MAX / 4096, 4096).is_err());
        assert_eq!(Arena::new(0, 4096).unwrap().1.len(), 0);
    }
}
