//! Locking on macOS, which has no call for all memory of a process.
#![allow(unsafe_code)]

use std::{io, ops::Range};

use rustix::{
    param::page_size,
    process::{Resource, getrlimit},
};

/// The name of the limit of locked memory.
pub const LIMIT: &str = "RLIMIT_MEMLOCK";
/// What to do so that more is locked.
pub const REMEDY: &str = "keep fewer experts in memory, with --cache";

/// `VM_REGION_BASIC_INFO_64` of mach/vm_region.h, and the number of integers of its record.
const BASIC_INFO: i32 = 9;
const BASIC_INFO_INTEGERS: u32 = 9;
/// Protection: the bits of reading and writing.
const READ_AND_WRITE: i32 = 3;

unsafe extern "C" {
    /// The port of this task, which the C library has at hand.
    static mach_task_self_: libc::mach_port_t;

    /// Looks for the first region of memory at an address or behind it.
    fn mach_vm_region(
        task: libc::mach_port_t,
        address: *mut u64,
        size: *mut u64,
        flavor: i32,
        info: *mut i32,
        info_integers: *mut u32,
        object: *mut libc::mach_port_t,
    ) -> libc::kern_return_t;
}

/// The most bytes that this process may lock.
pub fn limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// Fails: only ranges can be locked.
pub fn lock_all(_: bool) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "macOS locks no more"))
}

/// Private memory of this process that can be written to.
pub fn own_memory() -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut address = 0_u64;
    loop {
        let (mut size, mut info, mut integers, mut object) = (0_u64, [0_i32; 9], BASIC_INFO_INTEGERS, 0);
        // SAFETY: `info` has `integers` integers, and the port of the own task is always valid.
        let done = unsafe {
            mach_vm_region(
                mach_task_self_,
                &mut address,
                &mut size,
                BASIC_INFO,
                info.as_mut_ptr(),
                &mut integers,
                &mut object,
            )
        };
        if done != 0 || size == 0 {
            return found;
        }
        // The record begins with the protection; its fourth integer says whether the region is shared.
        if info[0] & READ_AND_WRITE == READ_AND_WRITE && info[3] == 0 {
            found.push(address as usize..(address + size) as usize);
        }
        address += size;
    }
}

/// Locks ranges in order, as far as the system allows; returns the bytes that were locked.
pub fn lock_ranges(ranges: &[Range<usize>], _: bool) -> u64 {
    let page = page_size();
    let lock = |range: &Range<usize>| {
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        // SAFETY: locking neither reads nor writes memory; it returns an error for ranges that are not mapped any more.
        let done = start < end && unsafe { rustix::mm::mlock(start as *mut _, end - start) }.is_ok();
        if done { (end - start) as u64 } else { 0 }
    };
    ranges.iter().map(lock).sum()
}
