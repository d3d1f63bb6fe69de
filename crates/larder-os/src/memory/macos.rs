//! Memory on macOS, from sysctl and the Mach calls about this host and this task.
#![allow(unsafe_code)]

use std::mem::{self, MaybeUninit};

use crate::sysctl_number;

unsafe extern "C" {
    /// The port of this task, which the C library has at hand.
    static mach_task_self_: libc::mach_port_t;
}

/// Memory that the system can give without swapping, in bytes: free pages, and pages of files and of others that it
/// drops first.
pub fn available() -> Option<u64> {
    let mut found = MaybeUninit::<libc::vm_statistics64>::zeroed();
    let mut count = (size_of::<libc::vm_statistics64>() / size_of::<libc::integer_t>()) as u32;
    // SAFETY: the result has room for `count` integers; the host's port needs no closing.
    let done = unsafe {
        #[allow(deprecated)]
        let host = libc::mach_host_self();
        libc::host_statistics64(host, libc::HOST_VM_INFO64, found.as_mut_ptr().cast(), &mut count)
    };
    // SAFETY: all bytes were zero, and all values of them are valid numbers.
    let found = unsafe { found.assume_init() };
    let pages = u64::from(found.free_count) + u64::from(found.inactive_count) + u64::from(found.purgeable_count);
    (done == 0).then(|| pages * rustix::param::page_size() as u64)
}

/// Memory of the machine, in bytes.
pub fn total() -> Option<u64> {
    sysctl_number(c"hw.memsize")
}

/// Peak memory of this process, in bytes.
pub fn peak() -> Option<u64> {
    task().map(|found| found.resident_size_max)
}

/// Current memory of this process, in bytes.
pub fn current() -> Option<u64> {
    task().map(|found| found.resident_size)
}

/// Page faults of this process so far that read nothing.
pub fn page_faults() -> Option<u64> {
    let mut found = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills in the whole record.
    let done = unsafe { libc::getrusage(libc::RUSAGE_SELF, found.as_mut_ptr()) };
    // SAFETY: all bytes were zero, and all values of them are valid numbers.
    (done == 0).then(|| unsafe { found.assume_init() }.ru_minflt as u64)
}

/// Locked memory of this process, in bytes: the system does not say.
pub fn locked() -> Option<u64> {
    None
}

/// The system does not say how much of the program was touched.
pub fn untouched_code() -> Option<u64> {
    None
}

fn task() -> Option<libc::mach_task_basic_info> {
    let mut found = MaybeUninit::<libc::mach_task_basic_info>::zeroed();
    let mut count = (mem::size_of::<libc::mach_task_basic_info>() / size_of::<libc::integer_t>()) as u32;
    // SAFETY: the result has room for `count` integers, and the port of the own task is always valid.
    let done =
        unsafe { libc::task_info(mach_task_self_, libc::MACH_TASK_BASIC_INFO, found.as_mut_ptr().cast(), &mut count) };
    // SAFETY: all bytes were zero, and all values of them are valid numbers.
    (done == 0).then(|| unsafe { found.assume_init() })
}
