//! The job object that this process runs in, as containers and schedulers on Windows have one.
#![allow(unsafe_code)]

use std::ptr;

use windows_sys::Win32::System::JobObjects::{
    JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOBOBJECT_EXTENDED_LIMIT_INFORMATION,
    JobObjectExtendedLimitInformation, QueryInformationJobObject,
};

use crate::memory;

/// The name of a group, for people.
pub const NAME: &str = "job object";

/// Memory that this process can still commit below the limits of its job, in bytes. Of the other processes of the job
/// nothing is known.
pub fn headroom() -> Option<i64> {
    let [limit, used] = [limit()?, memory::committed()?].map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    Some(limit - used)
}

/// A job refuses memory beyond its limit, and does not count how often.
pub fn limits_reached() -> u64 {
    0
}

/// The lower of the limits of this process and of all processes of the job, in bytes; `None` without a job or a limit.
pub fn limit() -> Option<u64> {
    let found = limits()?;
    let flags = found.BasicLimitInformation.LimitFlags;
    let of = |flag, bytes: usize| (flags & flag != 0).then_some(bytes as u64);
    let limits = [
        of(JOB_OBJECT_LIMIT_PROCESS_MEMORY, found.ProcessMemoryLimit),
        of(JOB_OBJECT_LIMIT_JOB_MEMORY, found.JobMemoryLimit),
    ];
    limits.into_iter().flatten().min()
}

/// The system does not say how long processes waited for memory.
pub fn pressure() -> Option<f64> {
    None
}

fn limits() -> Option<JOBOBJECT_EXTENDED_LIMIT_INFORMATION> {
    let mut found = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
    let bytes = size_of_val(&found) as u32;
    // SAFETY: null names the job of this process, and `found` has `bytes` bytes.
    let done = unsafe {
        QueryInformationJobObject(
            ptr::null_mut(),
            JobObjectExtendedLimitInformation,
            (&raw mut found).cast(),
            bytes,
            ptr::null_mut(),
        )
    };
    (done != 0).then_some(found)
}
