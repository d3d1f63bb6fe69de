//! Available and used memory: the system's, this process's, and what the limits of the group of processes leave that it
//! belongs to. One file per system, with the same functions.

use super::group;

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

#[cfg(windows)]
pub(super) use system::committed;
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(super) use system::locked_addresses;
pub use system::{current, locked, page_faults, peak, total};

/// Code pages that are touched only while a model runs. Measured: 1.7 to 2.1 MB between the plan and the end of a run.
const CODE_BYTES: u64 = 4 << 20;
/// As [`CODE_BYTES`], with a GPU's driver and compiler of kernels.
const CODE_BYTES_WITH_GPU: u64 = 64 << 20;
/// Stack that a thread touches.
const STACK_BYTES: u64 = 64 << 10;
/// Threads beside those that compute: one paces reads, one touches memory ahead of them.
const OTHER_THREADS: usize = 2;
/// What the allocator holds beyond what was asked for.
const ALLOCATOR_BYTES: u64 = 1 << 20;

/// Memory that can be used without swapping, in bytes: the system's, within the limits of the group. `None` if neither
/// is known.
pub fn available() -> Option<u64> {
    match (system::available(), group::available()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// As [`available`], in bytes, but negative by how much the limit of a group is exceeded.
pub fn headroom() -> Option<i64> {
    let system = system::available().map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    match (system, group::headroom()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The most memory that the machine and the group let this process have, in bytes.
pub fn limit() -> Option<u64> {
    match (total(), group::limit()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Memory that this process will take beyond [`current`] for pages of its code, the stacks of `threads` and of the
/// reader's, and by its allocator, in bytes.
pub fn growth(threads: usize, on_gpu: bool) -> u64 {
    let most = if on_gpu { CODE_BYTES_WITH_GPU } else { CODE_BYTES };
    let code = most.min(system::untouched_code().unwrap_or(most));
    code + (threads + OTHER_THREADS) as u64 * STACK_BYTES + ALLOCATOR_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_and_the_process_have_memory() {
        let [total, available, current, peak] = [total(), available(), current(), peak()].map(Option::unwrap);
        assert!(total > available && available > 0, "{total} {available}");
        assert!(peak >= current && current > 100_000, "{peak} {current}");
        assert!(limit().unwrap() <= total);
        assert!(growth(2, false) >= 2 * STACK_BYTES + ALLOCATOR_BYTES);
        assert!(growth(2, true) >= growth(2, false));
        assert_eq!(locked().is_some(), cfg!(any(target_os = "linux", target_os = "android")));
    }
}
