//! Available and used memory, from /proc and control groups.

use std::fs;

use super::group;

/// Memory that can be used without swapping, in bytes: the system's MemAvailable, within the limits of the control group.
/// `None` if neither can be read.
pub fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:"));
    match (system, group::available()) {
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
    fn meminfo_is_in_kibibytes() {
        assert_eq!(meminfo("MemTotal:  10 kB\nMemAvailable:   8 kB\n", "MemAvailable:"), Some(8192));
        assert_eq!(meminfo("MemTotal:  10 kB\n", "MemAvailable:"), None);
    }
}
