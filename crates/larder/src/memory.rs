//! How much memory there is to use.

use std::fs;

/// Bytes that can be used without pushing anything out: what the system calls available, within the limits of the
/// control group. `None` where neither can be read.
pub fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:"));
    let group = group_available();
    match (system, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Bytes that the machine has.
pub fn total() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// The nearest limit of the control group, in bytes.
pub fn group_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().filter_map(|line| ControlGroup::of(line, CGROUP_ROOT)?.limit()).min()
}

/// The most memory that this process has held so far, in bytes.
pub fn peak() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory that this process holds now, in bytes.
pub fn current() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// The memory of this process that is locked, in bytes.
pub fn locked() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/self/status").ok()?, "VmLck:")
}

fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Where control groups are.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// What version 1 says where there is no limit, rounded down to pages of any size.
const NO_LIMIT: u64 = 1 << 62;

/// What is left below the nearest limit, of version 2 or version 1 of control groups.
fn group_available() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().filter_map(|line| ControlGroup::of(line, CGROUP_ROOT)?.available()).min()
}

/// A control group and those above it.
struct ControlGroup {
    dirs: Vec<String>,
    limit: &'static str,
    used: &'static str,
}

impl ControlGroup {
    /// That of a line of `/proc/self/cgroup`, if it limits memory.
    fn of(line: &str, root: &str) -> Option<Self> {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (base, limit, used) = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current"),
            c if c.split(',').any(|c| c == "memory") => {
                (format!("{root}/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        // A limit may be set on any group above; a container often sees its own group as the root.
        let mut dirs = vec![base.clone()];
        let mut dir = base;
        for part in path.split('/').filter(|p| !p.is_empty()) {
            dir = format!("{dir}/{part}");
            dirs.push(dir.clone());
        }
        Some(ControlGroup { dirs, limit, used })
    }

    fn limit(&self) -> Option<u64> {
        self.dirs.iter().filter_map(|dir| number(dir, self.limit)).filter(|limit| *limit < NO_LIMIT).min()
    }

    fn available(&self) -> Option<u64> {
        let available = |dir: &String| Some(number(dir, self.limit)?.saturating_sub(number(dir, self.used)?));
        self.dirs.iter().filter_map(available).min()
    }
}

fn number(dir: &str, name: &str) -> Option<u64> {
    fs::read_to_string(format!("{dir}/{name}")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_on_the_way_counts() {
        let root = tempfile::tempdir().unwrap();
        let dir = |path: &str, limit: &str, used: &str| {
            let dir = root.path().join(path);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("memory.max"), limit).unwrap();
            fs::write(dir.join("memory.current"), used).unwrap();
        };
        dir("a", "1000\n", "400\n");
        dir("a/b", "max\n", "100\n");
        let root = root.path().to_str().unwrap();
        let group = ControlGroup::of("0::/a/b", root).unwrap();
        assert_eq!((group.available(), group.limit()), (Some(600), Some(1000)));
        assert_eq!(ControlGroup::of("0::/", root).unwrap().available(), None);
        assert!(ControlGroup::of("3:cpu,cpuacct:/a", root).is_none());
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        assert_eq!(meminfo("MemTotal:  10 kB\nMemAvailable:   8 kB\n", "MemAvailable:"), Some(8192));
        assert_eq!(meminfo("MemTotal:  10 kB\n", "MemAvailable:"), None);
    }
}
