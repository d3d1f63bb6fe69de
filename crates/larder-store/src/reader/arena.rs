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
use memmap2::MmapMut;

/// Alignment of the first slot in bytes: a huge page.
const ARENA_ALIGN: usize = 2 << 20;
/// Largest slot in bytes; the kernel neither reads much more at a time nor registers longer buffers.
pub(super) const SLOT_BYTES_MAX: usize = 1 << 30;

/// The mapping that holds all slots. It gives no access to bytes; those belong to the slots.
#[derive(Clone)]
pub struct Arena {
    map: Arc<MmapMut>,
    first: NonNull<u8>,
    /// Offset of each slot from the first, ascending, and the end of the last.
    starts: Arc<[usize]>,
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
        let arena = Arena { map: Arc::new(map), first, starts: starts.into() };
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
    map: Arc<MmapMut>,
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
