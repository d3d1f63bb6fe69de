//! Memory on Linux and Android, from /proc.

use std::fs;

/// Memory that the system can give without swapping, in bytes.
pub fn available() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
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

/// Page faults of this process so far that read nothing.
pub fn page_faults() -> Option<u64> {
    minor_faults(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// From `/proc/self/stat`. Behind the name of the command, which may have spaces, there are state, parent, group,
/// session, terminal, its group, flags and faults.
fn minor_faults(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
}

/// Bytes of mapped files, such as the program, that were not touched yet.
pub fn untouched_code() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    Some(mapped_files(&maps).saturating_sub(meminfo(&status, "RssFile:")?))
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

/// Locked memory of this process that it can use, in bytes; with pages that are locked when they are touched.
pub fn locked() -> Option<u64> {
    locked_mappings(&fs::read_to_string("/proc/self/smaps").ok()?)
}

/// Bytes that count against the limit of locked memory: with addresses that the allocator only reserves, 64 MiB per
/// thread.
pub fn locked_addresses() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmLck:")
}

/// Bytes of the mappings in the lines of `/proc/self/smaps` that are locked and can be accessed. `None` if they do not
/// say.
fn locked_mappings(smaps: &str) -> Option<u64> {
    let (mut accessible, mut bytes, mut locked) = (false, 0, None);
    for line in smaps.lines() {
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("Size:") => bytes = fields.next()?.parse::<u64>().ok()?.checked_mul(1024)?,
            Some("VmFlags:") => {
                let counts = accessible && fields.any(|flag| flag == "lo");
                locked = Some(locked.unwrap_or(0) + if counts { bytes } else { 0 });
            }
            Some(range) if !range.ends_with(':') => accessible = fields.next().is_some_and(|access| access != "---p"),
            _ => {}
        }
    }
    locked
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
    }

    #[test]
    fn locked_mappings_are_those_that_can_be_accessed() {
        let smaps = "1000-3000 r-xp 00002000 fe:00 247030   /usr/bin/larder\nSize:       8 kB\nRss:     4 kB\nVmFlags: rd ex mr\n\
                     5000-9000 rw-p 00000000 00:00 0        [heap]\nSize:      16 kB\nVmFlags: rd wr mr lo ac\n\
                     9000-f000 ---p 00000000 00:00 0 \nSize:      24 kB\nVmFlags: mr lo nr\n";
        assert_eq!(locked_mappings(smaps), Some(16 << 10));
        assert_eq!(locked_mappings("1000-3000 r-xp 00002000 fe:00 1 a\nSize: 8 kB\n"), None);
    }

    #[test]
    fn faults_stand_behind_the_name_of_the_command() {
        assert_eq!(minor_faults("7 (a b) c) R 1 7 7 0 -1 4194304 98 0 3 0 1 2"), Some(98));
        assert_eq!(minor_faults("7 (a) R 1"), None);
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        assert_eq!(meminfo("MemTotal:  10 kB\nMemAvailable:   8 kB\n", "MemAvailable:"), Some(8192));
        assert_eq!(meminfo("MemTotal:  10 kB\n", "MemAvailable:"), None);
    }
}
