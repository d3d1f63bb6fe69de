//! Available and used memory, from /proc and control groups.

use std::fs;

/// Memory that can be used without swapping, in bytes: the system's MemAvailable, within the limits of the control group.
/// `None` if neither can be read.
pub fn available() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable:"));
    let group = group_available();
    match (system, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Memory of the machine, in bytes.
pub fn total() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// The lowest limit of the control group and its parents, in bytes.
pub fn group_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().filter_map(|line| ControlGroup::of(line, CGROUP_ROOT)?.limit()).min()
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

/// Mount point of control groups.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// At least this is what version 1 reports without a limit; it depends on the page size.
const NO_LIMIT: u64 = 1 << 62;

/// Memory left below the limits of control groups, version 1 and 2.
fn group_available() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().filter_map(|line| ControlGroup::of(line, CGROUP_ROOT)?.available()).min()
}

/// A control group with its parents.
struct ControlGroup {
    dirs: Vec<String>,
    limit: &'static str,
    used: &'static str,
}

impl ControlGroup {
    /// The group of a line of `/proc/self/cgroup`, if it limits memory.
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
        // Any parent may have a limit; a container often sees its own group as the root.
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
    fn the_tightest_parent_limits() {
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
