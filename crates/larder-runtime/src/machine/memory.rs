//! Available and used memory, from /proc and control groups.

use std::fs;

use super::group;

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

/// Memory that can be used without swapping, in bytes: the system's MemAvailable, within the limits of the control group.
/// `None` if neither can be read.
pub fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:"));
    match (system, group::available()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// As [`available`], in bytes, but negative by how much the limit of a control group is exceeded.
pub fn headroom() -> Option<i64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:"));
    let system = system.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    match (system, group::headroom()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The most memory that the machine and its control groups let this process have, in bytes.
pub fn limit() -> Option<u64> {
    match (total(), group::limit()) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Memory of the machine, in bytes.
pub fn total() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// Peak memory of this process, in bytes.
pub fn peak() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Current memory of this process, in bytes.
pub fn current() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Memory that this process will take beyond [`current`] for pages of its code, the stacks of `threads` and of the reader's,
/// and by its allocator, in bytes.
pub fn growth(threads: usize, on_gpu: bool) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let most = if on_gpu { CODE_BYTES_WITH_GPU } else { CODE_BYTES };
    let untouched = meminfo(&status, "RssFile:").map(|touched| mapped_files(&maps).saturating_sub(touched));
    most.min(untouched.unwrap_or(most)) + (threads + OTHER_THREADS) as u64 * STACK_BYTES + ALLOCATOR_BYTES
}

/// Bytes of files in the lines of `/proc/self/maps`.
fn mapped_files(maps: &str) -> u64 {
    let bytes = |line: &str| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let inode = fields.nth(3)?;
        let range = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (inode != "0").then(|| range.1.saturating_sub(range.0))
    };
    maps.lines().filter_map(bytes).fold(0, u64::saturating_add)
}

/// Locked memory of this process, in bytes.
pub fn locked() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmLck:")
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mappings_of_files_count_as_code() {
        let maps = "1000-3000 r-xp 00002000 fe:00 247030   /usr/bin/larder\n\
                    5000-7000 rw-p 00000000 00:00 0        [heap]\n\
                    8000-9000 r--p 00000000 fe:00 11       /lib/libc.so\nnonsense\n";
        assert_eq!(mapped_files(maps), 0x3000);
        assert!(growth(2, false) >= 2 * STACK_BYTES + ALLOCATOR_BYTES);
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        assert_eq!(meminfo("MemTotal:  10 kB\nMemAvailable:   8 kB\n", "MemAvailable:"), Some(8192));
        assert_eq!(meminfo("MemTotal:  10 kB\n", "MemAvailable:"), None);
    }
}
