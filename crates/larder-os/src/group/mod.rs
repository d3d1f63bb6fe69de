//! The group of processes that this one belongs to, and the memory that its limits leave: control groups on Linux, a
//! job object on Windows, and nothing elsewhere.

#[cfg(any(target_os = "linux", target_os = "android"))]
mod control_group;
#[cfg(any(target_os = "linux", target_os = "android"))]
use control_group as system;
#[cfg(windows)]
mod job_object;
#[cfg(windows)]
use job_object as system;
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
mod none;
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
use none as system;

pub use system::{NAME, headroom, limit, limits_reached, pressure};

/// Memory that can still be used below the limits of the group, in bytes; `None` without a limit. Page cache counts as
/// available, because the kernel reclaims it first.
pub fn available() -> Option<u64> {
    headroom().map(|bytes| bytes.max(0) as u64)
}
