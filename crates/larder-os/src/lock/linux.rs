//! Locking on Linux and Android.
#![allow(unsafe_code)]

use std::{fs, io, ops::Range};

use rustix::{
    mm::{MlockAllFlags, MlockFlags, mlock_with, mlockall},
    param::page_size,
    process::{Resource, getrlimit},
};

use crate::memory;

/// The name of the limit of locked memory.
pub const LIMIT: &str = "RLIMIT_MEMLOCK";
/// What to do so that more is locked.
pub const REMEDY: &str = "to lock all, raise the limit with `ulimit -l unlimited` as root";

/// The most bytes that this process may lock.
pub fn limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// Locks everything that is mapped.
pub fn lock_all(on_fault: bool) -> io::Result<()> {
    let when = if on_fault { MlockAllFlags::ONFAULT } else { MlockAllFlags::empty() };
    Ok(mlockall(MlockAllFlags::CURRENT | when)?)
}

/// Anonymous memory of this process.
pub fn own_memory() -> Vec<Range<usize>> {
    parse_maps(&fs::read_to_string("/proc/self/maps").unwrap_or_default())
}

/// Locks ranges in order, as far as the limit allows; returns the bytes that were locked.
pub fn lock_ranges(ranges: &[Range<usize>], on_fault: bool) -> u64 {
    let mut allowed =
        limit().unwrap_or(u64::MAX).saturating_sub(memory::locked_addresses().unwrap_or_default()) as usize;
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
    locked
}

fn parse_maps(maps: &str) -> Vec<Range<usize>> {
    maps.lines().filter_map(anonymous).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_mappings_of_no_file_are_memory() {
        let maps = "1000-3000 r-xp 00002000 fe:00 247030   /usr/bin/larder\n\
                    3000-4000 rw-p 0000a000 fe:00 247030   /usr/bin/larder\n\
                    5000-7000 rw-p 00000000 00:00 0        [heap]\n\
                    8000-f000 rw-p 00000000 00:00 0 \n\
                    f000-10000 ---p 00000000 00:00 0 \n\
                    20000-21000 rw-p 00000000 00:00 0      [stack]\n";
        assert_eq!(parse_maps(maps), [0x5000..0x7000, 0x8000..0xf000]);
        assert!(parse_maps("nonsense\n\n1-2\n").is_empty());
    }
}
