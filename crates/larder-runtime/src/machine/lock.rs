//! Locks memory so that the system does not swap it out, as far as it allows: resident weights first, then slots.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ops::Range;

use rustix::mm::{MlockAllFlags, MlockFlags, mlock_with, mlockall};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

use larder_core::format_bytes;

use super::memory;

/// How much memory was locked.
pub struct LockReport {
    /// Bytes that are locked.
    bytes: u64,
    /// Bytes that were to be locked, and why not all of them were.
    refused: Option<(u64, io::Error)>,
}

/// The addresses of slots.
#[derive(Default)]
pub struct SlotAddresses {
    /// Of all slots.
    pub all: Range<usize>,
    /// Of those that are in use, ascending.
    pub in_use: Vec<Range<usize>>,
}

/// Locks all memory that is mapped so far; `on_fault`: what is not touched yet, when it is touched. If the limit allows only some
/// of it, weights and everything else that every token needs are locked first, and then the slots in use. Where the limit
/// allows all, slots that are not in use are locked too, until the caller gives them back.
pub fn lock(slots: &SlotAddresses, on_fault: bool) -> LockReport {
    let when = if on_fault { MlockAllFlags::ONFAULT } else { MlockAllFlags::empty() };
    let Err(refused) = mlockall(MlockAllFlags::CURRENT | when) else { return LockReport::now(None) };
    let ranges = lock_order(&fs::read_to_string("/proc/self/maps").unwrap_or_default(), slots);
    let all: u64 = ranges.iter().map(|range| range.len() as u64).sum();
    let limit = getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX);
    let mut allowed = limit.saturating_sub(memory::locked().unwrap_or_default()) as usize;
    let mut locked = 0;
    for range in ranges {
        let bytes = range.len().min(allowed) / page_size() * page_size();
        let when = if on_fault { MlockFlags::ONFAULT } else { MlockFlags::empty() };
        // SAFETY: locking neither reads nor writes memory; it returns an error for ranges that are not mapped any more.
        if bytes > 0 && unsafe { mlock_with(range.start as *mut _, bytes, when) }.is_ok() {
            allowed -= bytes;
            locked += bytes as u64;
        }
    }
    LockReport::now((locked < all).then(|| (all, refused.into())))
}

/// Ranges to lock, in order: anonymous memory of this process, largest first, and then the slots in use.
fn lock_order(maps: &str, slots: &SlotAddresses) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> =
        maps.lines().filter_map(anonymous).flat_map(|map| without_slots(map, &slots.all)).collect();
    ranges.sort_by_key(|range| usize::MAX - range.len());
    ranges.extend_from_slice(&slots.in_use);
    ranges.retain(|range| !range.is_empty());
    ranges
}

/// The range of a line of `/proc/self/maps`, if it is writable and not backed by a file.
fn anonymous(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_whitespace();
    let (range, access) = (fields.next()?, fields.next()?);
    let of_no_file = fields.nth(2)? == "0" && fields.next().is_none_or(|name| name == "[heap]");
    let (start, end) = range.split_once('-')?;
    let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    (access.starts_with("rw") && of_no_file).then_some(range)
}

/// The parts of `map` before and after the slots, because the kernel may have merged both into one mapping.
fn without_slots(map: Range<usize>, slots: &Range<usize>) -> [Range<usize>; 2] {
    match slots.is_empty() {
        true => [map, 0..0],
        false => [map.start..map.end.min(slots.start), map.start.max(slots.end)..map.end],
    }
}

impl LockReport {
    /// With what is locked now.
    fn now(refused: Option<(u64, io::Error)>) -> Self {
        LockReport { bytes: memory::locked().unwrap_or_default(), refused }
    }

    /// The same with what is locked now, after slots were unlocked.
    pub fn again(self) -> Self {
        Self::now(self.refused)
    }

    /// The result, in one line.
    pub fn describe(&self) -> String {
        let bytes = format_bytes(self.bytes);
        match (&self.refused, getrlimit(Resource::Memlock).current) {
            (None, _) => format!("locked: {bytes} of memory"),
            (Some((all, cause)), limit) => format!(
                "locked: {bytes} of {} of memory, weights before experts; the rest may be swapped out ({cause}{}); to lock \
                 all, raise the limit with `ulimit -l unlimited` as root",
                format_bytes(*all),
                limit.map(|limit| format!(", RLIMIT_MEMLOCK is {}", format_bytes(limit))).unwrap_or_default(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_last_even_if_their_mapping_is_shared() {
        let maps = "1000-3000 r-xp 00002000 fe:00 247030   /usr/bin/larder\n\
                    3000-4000 rw-p 0000a000 fe:00 247030   /usr/bin/larder\n\
                    5000-7000 rw-p 00000000 00:00 0        [heap]\n\
                    8000-f000 rw-p 00000000 00:00 0 \n\
                    f000-10000 ---p 00000000 00:00 0 \n\
                    20000-21000 rw-p 00000000 00:00 0      [stack]\n";
        let slots = |in_use: &[Range<usize>]| SlotAddresses { all: 0xa000..0xc000, in_use: in_use.to_vec() };
        let others = [0xc000..0xf000, 0x5000..0x7000, 0x8000..0xa000];
        let with = |slots: &[Range<usize>]| [&others[..], slots].concat();
        let all = 0xa000..0xc000;
        assert_eq!(lock_order(maps, &slots(std::slice::from_ref(&all))), with(&[all]));
        let second = std::slice::from_ref(&(0xb000..0xc000));
        assert_eq!(lock_order(maps, &slots(second)), with(second), "the first slot is not in use");
        assert_eq!(lock_order(maps, &slots(&[])), others);
        assert_eq!(lock_order(maps, &SlotAddresses::default()), [0x8000..0xf000, 0x5000..0x7000]);
        assert!(lock_order("nonsense\n\n1-2\n", &SlotAddresses::default()).is_empty());
    }
}
