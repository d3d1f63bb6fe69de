//! Memory on Windows.
#![allow(unsafe_code)]

use windows_sys::Win32::System::{
    ProcessStatus::{GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS, PROCESS_MEMORY_COUNTERS_EX},
    SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX},
    Threading::GetCurrentProcess,
};

/// Memory that the system can give, in bytes: physical memory, within what may still be committed.
pub fn available() -> Option<u64> {
    status().map(|found| found.ullAvailPhys.min(found.ullAvailPageFile))
}

/// Memory of the machine, in bytes.
pub fn total() -> Option<u64> {
    status().map(|found| found.ullTotalPhys)
}

/// Peak memory of this process, in bytes.
pub fn peak() -> Option<u64> {
    counters().map(|found| found.PeakWorkingSetSize as u64)
}

/// Current memory of this process, in bytes.
pub fn current() -> Option<u64> {
    counters().map(|found| found.WorkingSetSize as u64)
}

/// Private memory that this process has committed, in bytes; limits of a job count it.
pub fn committed() -> Option<u64> {
    counters().map(|found| found.PrivateUsage as u64)
}

/// Page faults of this process so far, those that read among them.
pub fn page_faults() -> Option<u64> {
    counters().map(|found| u64::from(found.PageFaultCount))
}

/// Locked memory of this process, in bytes: the system does not say.
pub fn locked() -> Option<u64> {
    None
}

/// The system does not say how much of the program was touched.
pub fn untouched_code() -> Option<u64> {
    None
}

fn status() -> Option<MEMORYSTATUSEX> {
    let mut found = MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..Default::default() };
    // SAFETY: the result says its own length, as the call requires.
    (unsafe { GlobalMemoryStatusEx(&mut found) } != 0).then_some(found)
}

fn counters() -> Option<PROCESS_MEMORY_COUNTERS_EX> {
    let bytes = size_of::<PROCESS_MEMORY_COUNTERS_EX>() as u32;
    let mut found = PROCESS_MEMORY_COUNTERS_EX { cb: bytes, ..Default::default() };
    // SAFETY: the result has `bytes` bytes, and begins as the shorter record; the handle needs no closing.
    let done =
        unsafe { GetProcessMemoryInfo(GetCurrentProcess(), (&raw mut found).cast::<PROCESS_MEMORY_COUNTERS>(), bytes) };
    (done != 0).then_some(found)
}
