//! Locks memory so that the system does not swap it out, as far as it allows: resident weights first, then slots.

use std::io;
use std::ops::Range;

use crate::memory;

#[cfg(any(target_os = "linux", target_os = "android"))]
mod linux;
#[cfg(any(target_os = "linux", target_os = "android"))]
use linux as system;
#[cfg(target_vendor = "apple")]
mod macos;
#[cfg(target_vendor = "apple")]
use macos as system;
#[cfg(windows)]
mod windows;
#[cfg(windows)]
use windows as system;

pub use system::{LIMIT, REMEDY, limit};

/// How much memory was locked.
pub struct LockReport {
    /// Bytes that are locked.
    pub bytes: u64,
    /// Bytes that were to be locked, and why not all of them were.
    pub refused: Option<(u64, io::Error)>,
}

/// The addresses of slots.
#[derive(Default)]
pub struct SlotAddresses {
    /// Of all slots.
    pub all: Range<usize>,
    /// Of those that are in use, ascending.
    pub in_use: Vec<Range<usize>>,
}

/// Locks all memory that is mapped so far; `on_fault`: what is not touched yet, when it is touched, where the system
/// can tell. If the limit allows only some of it, weights and everything else that every token needs are locked first,
/// and then the slots in use. Where the limit allows all, slots that are not in use are locked too, until the caller
/// gives them back.
pub fn lock(slots: &SlotAddresses, on_fault: bool) -> LockReport {
    let Err(refused) = system::lock_all(on_fault) else { return LockReport::now(None, 0) };
    let ranges = lock_order(system::own_memory(), slots);
    let all: u64 = ranges.iter().map(|range| range.len() as u64).sum();
    let locked = system::lock_ranges(&ranges, on_fault);
    LockReport::now((locked < all).then_some((all, refused)), locked)
}

/// Ranges to lock, in order: anonymous memory of this process, largest first, and then the slots in use.
fn lock_order(memory: Vec<Range<usize>>, slots: &SlotAddresses) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = memory.into_iter().flat_map(|map| without_slots(map, &slots.all)).collect();
    ranges.sort_by_key(|range| usize::MAX - range.len());
    ranges.extend_from_slice(&slots.in_use);
    ranges.retain(|range| !range.is_empty());
    ranges
}

/// The parts of `map` before and after the slots, because the kernel may have merged both into one mapping.
fn without_slots(map: Range<usize>, slots: &Range<usize>) -> [Range<usize>; 2] {
    if slots.is_empty() {
        [map, 0..0]
    } else {
        [map.start..map.end.min(slots.start), map.start.max(slots.end)..map.end]
    }
}

impl LockReport {
    /// With what is locked now; `counted` bytes where the system does not say.
    fn now(refused: Option<(u64, io::Error)>, counted: u64) -> Self {
        LockReport { bytes: memory::locked().unwrap_or(counted), refused }
    }

    /// The same with what is locked now, after slots were unlocked.
    pub fn again(self) -> Self {
        Self::now(self.refused, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_last_even_if_their_mapping_is_shared() {
        let memory = || vec![0x5000..0x7000, 0x8000..0xf000];
        let slots = |in_use: &[Range<usize>]| SlotAddresses { all: 0xa000..0xc000, in_use: in_use.to_vec() };
        let others = [0xc000..0xf000, 0x5000..0x7000, 0x8000..0xa000];
        let with = |slots: &[Range<usize>]| [&others[..], slots].concat();
        let all = 0xa000..0xc000;
        assert_eq!(lock_order(memory(), &slots(std::slice::from_ref(&all))), with(&[all]));
        let second = std::slice::from_ref(&(0xb000..0xc000));
        assert_eq!(lock_order(memory(), &slots(second)), with(second), "the first slot is not in use");
        assert_eq!(lock_order(memory(), &slots(&[])), others);
        assert_eq!(lock_order(memory(), &SlotAddresses::default()), [0x8000..0xf000, 0x5000..0x7000]);
        assert!(lock_order(vec![], &SlotAddresses::default()).is_empty());
    }
}
