//! Locking on Windows: pages that stay in the working set, whose least size is raised by what is locked.
#![allow(unsafe_code)]

use std::{io, ops::Range};

use windows_sys::Win32::System::{
    Memory::{MEM_COMMIT, MEM_IMAGE, MEMORY_BASIC_INFORMATION, PAGE_READWRITE, VirtualLock, VirtualQuery},
    Threading::{GetCurrentProcess, GetProcessWorkingSetSize, SetProcessWorkingSetSize},
};

/// The name of the limit of locked memory.
pub const LIMIT: &str = "the least working set";
/// What to do so that more is locked.
pub const REMEDY: &str = "keep fewer experts in memory, with --cache";

/// What the working set has beside locked memory.
const OTHER_BYTES: usize = 16 << 20;

/// The system has no fixed limit: it is raised as needed.
pub fn limit() -> Option<u64> {
    None
}

/// Fails: only ranges can be locked.
pub fn lock_all(_: bool) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "Windows locks no more"))
}

/// Committed memory of this process that can be written to, without that of programs and libraries.
pub fn own_memory() -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut address = 0_usize;
    loop {
        let mut info = MEMORY_BASIC_INFORMATION::default();
        // SAFETY: the call takes any address, and `info` has the length that is given.
        let got = unsafe { VirtualQuery(address as *const _, &mut info, size_of_val(&info)) };
        let Some(end) = (info.BaseAddress as usize).checked_add(info.RegionSize).filter(|_| got != 0) else {
            return found;
        };
        if info.State == MEM_COMMIT && info.Protect == PAGE_READWRITE && info.Type != MEM_IMAGE {
            found.push(info.BaseAddress as usize..end);
        }
        address = end;
    }
}

/// Locks ranges in order, as far as the system allows; returns the bytes that were locked.
pub fn lock_ranges(ranges: &[Range<usize>], _: bool) -> u64 {
    let all: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    raise_working_set(all);
    let lock = |range: &Range<usize>| {
        // SAFETY: locking neither reads nor writes memory; it returns an error for ranges that are not mapped any more.
        let done = unsafe { VirtualLock(range.start as *const _, range.len()) } != 0;
        if done { range.len() as u64 } else { 0 }
    };
    ranges.iter().map(lock).sum()
}

/// Lets this process lock this number of bytes more, if the system allows it.
fn raise_working_set(bytes: usize) {
    let (mut least, mut most) = (0, 0);
    // SAFETY: the handle of the current process needs no closing, and the places for the results are valid.
    unsafe {
        if GetProcessWorkingSetSize(GetCurrentProcess(), &mut least, &mut most) != 0 {
            let least = least + bytes + OTHER_BYTES;
            SetProcessWorkingSetSize(GetCurrentProcess(), least, most.max(least + OTHER_BYTES));
        }
    }
}
