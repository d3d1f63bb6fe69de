//! The memory of control groups, version 1 and 2. Files are read anew at each call, because limits may move.

use std::fs;

/// Mount point of control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// At least this is what version 1 reports without a limit; it depends on the page size.
const NO_LIMIT: u64 = 1 << 62;

/// The name of a group, for people.
pub const NAME: &str = "cgroup";

/// Memory that can still be used below the limits of this process's control groups, in bytes, negative by how much a
/// limit is exceeded, as one that was lowered may be; `None` without a limit. Page cache counts as available.
pub fn headroom() -> Option<i64> {
    own_groups(ROOT).iter().filter_map(ControlGroup::headroom).min()
}

/// How often this process's control groups have reached a limit so far.
pub fn limits_reached() -> u64 {
    own_groups(ROOT).iter().map(ControlGroup::limits_reached).sum()
}

/// The lowest limit of this process's control groups and their parents, in bytes.
pub fn limit() -> Option<u64> {
    own_groups(ROOT).iter().filter_map(ControlGroup::limit).min()
}

/// Share of the last ten seconds, 0 to 1, in which some task of the control group, or else of the system, waited for
/// memory.
pub fn pressure() -> Option<f64> {
    let of_group = own_groups(ROOT).iter().rev().find_map(|group| group.pressure());
    of_group.or_else(|| parse_pressure(&fs::read_to_string("/proc/pressure/memory").ok()?))
}

/// The groups of this process that can limit memory.
fn own_groups(root: &str) -> Vec<ControlGroup> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    own.lines().filter_map(|line| ControlGroup::of(line, root)).collect()
}

/// The file names of one version.
struct FileNames {
    /// A group cannot grow beyond the lowest of these: what is above `high` is reclaimed until the process stands
    /// still.
    limits: &'static [&'static str],
    used: &'static str,
    /// The keys of page cache in `memory.stat`, children included.
    page_cache: [&'static str; 2],
    /// A file that counts how often a limit was reached, and its keys; the key is empty if the file is one number.
    limits_reached: (&'static str, &'static [&'static str]),
}

const VERSION_1: FileNames = FileNames {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    page_cache: ["total_inactive_file", "total_active_file"],
    limits_reached: ("memory.failcnt", &[""]),
};
const VERSION_2: FileNames = FileNames {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    page_cache: ["inactive_file", "active_file"],
    limits_reached: ("memory.events", &["high", "max"]),
};

/// A control group with its parents.
struct ControlGroup {
    /// From the root down.
    dirs: Vec<String>,
    names: &'static FileNames,
}

impl ControlGroup {
    /// The group of a line of `/proc/self/cgroup`, if it limits memory.
    fn of(line: &str, root: &str) -> Option<Self> {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (base, names) = match controllers {
            "" => (root.to_owned(), &VERSION_2),
            c if c.split(',').any(|c| c == "memory") => (format!("{root}/memory"), &VERSION_1),
            _ => return None,
        };
        // Any parent may have a limit; a container often sees its own group as the root.
        let mut dirs = vec![base.clone()];
        let mut dir = base;
        for part in path.split('/').filter(|p| !p.is_empty()) {
            dir = format!("{dir}/{part}");
            dirs.push(dir.clone());
        }
        Some(ControlGroup { dirs, names })
    }

    fn limit(&self) -> Option<u64> {
        self.dirs.iter().filter_map(|dir| self.limit_of(dir)).min()
    }

    fn limit_of(&self, dir: &str) -> Option<u64> {
        let limits = self.names.limits.iter().filter_map(|name| number(dir, name));
        limits.filter(|limit| *limit < NO_LIMIT).min()
    }

    fn headroom(&self) -> Option<i64> {
        let headroom = |dir: &String| {
            let used = number(dir, self.names.used)?.saturating_sub(self.page_cache(dir));
            let [limit, used] = [self.limit_of(dir)?, used].map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
            Some(limit - used)
        };
        self.dirs.iter().filter_map(headroom).min()
    }

    fn limits_reached(&self) -> u64 {
        let (file, keys) = self.names.limits_reached;
        // The limit may be a parent's. One that counts its children's too is counted twice, but only changes matter.
        let text = |dir: &String| fs::read_to_string(format!("{dir}/{file}")).unwrap_or_default();
        let text = self.dirs.iter().map(text).collect::<Vec<_>>().join("\n");
        let count = |line: &str| {
            let (key, value) = line.split_once(' ').unwrap_or(("", line));
            keys.contains(&key).then(|| value.trim().parse::<u64>().ok())?
        };
        text.lines().filter_map(count).fold(0, u64::saturating_add)
    }

    /// Bytes of page cache in a group.
    fn page_cache(&self, dir: &str) -> u64 {
        let text = fs::read_to_string(format!("{dir}/memory.stat")).unwrap_or_default();
        let value = |line: &str| {
            let (key, value) = line.split_once(' ')?;
            self.names.page_cache.contains(&key).then(|| value.trim().parse::<u64>().ok())?
        };
        text.lines().filter_map(value).fold(0, u64::saturating_add)
    }

    fn pressure(&self) -> Option<f64> {
        parse_pressure(&fs::read_to_string(format!("{}/memory.pressure", self.dirs.last()?)).ok()?)
    }
}

/// The ten-second average of the line `some`, as a share.
fn parse_pressure(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let average = line.split_whitespace().find_map(|field| field.strip_prefix("avg10="))?;
    average.parse::<f64>().ok().map(|percent| percent / 100.0)
}

fn number(dir: &str, name: &str) -> Option<u64> {
    fs::read_to_string(format!("{dir}/{name}")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A folder with the files of a group.
    fn group(root: &Path, path: &str, files: &[(&str, &str)]) {
        let dir = root.join(path);
        fs::create_dir_all(&dir).unwrap();
        files.iter().for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
    }

    #[test]
    fn the_tightest_parent_limits() {
        let root = tempfile::tempdir().unwrap();
        group(root.path(), "a", &[("memory.max", "1000\n"), ("memory.current", "400\n")]);
        group(root.path(), "a/b", &[("memory.max", "max\n"), ("memory.current", "100\n")]);
        let root = root.path().to_str().unwrap();
        let found = ControlGroup::of("0::/a/b", root).unwrap();
        assert_eq!((found.headroom(), found.limit()), (Some(600), Some(1000)));
        assert_eq!(ControlGroup::of("0::/", root).unwrap().headroom(), None);
        assert!(ControlGroup::of("3:cpu,cpuacct:/a", root).is_none());
    }

    #[test]
    fn page_cache_is_available_and_high_is_a_limit() {
        let root = tempfile::tempdir().unwrap();
        let stat = "anon 300\nfile 250\ninactive_file 150\nactive_file 50\n";
        let files = [
            ("memory.max", "1000"),
            ("memory.high", "900"),
            ("memory.current", "600"),
            ("memory.stat", stat),
            ("memory.pressure", "some avg10=12.50 avg60=1.00 avg300=0.10 total=9\nfull avg10=3.00 total=1\n"),
        ];
        group(root.path(), "a", &files);
        let found = ControlGroup::of("0::/a", root.path().to_str().unwrap()).unwrap();
        assert_eq!((found.headroom(), found.limit()), (Some(900 - 400), Some(900)));
        assert_eq!(found.pressure(), Some(0.125));
        // The limit moves, also below what is used.
        assert_eq!(found.limits_reached(), 0);
        let events = "low 0\nhigh 4\nmax 3\noom 1\n";
        group(root.path(), "a", &[("memory.max", "300"), ("memory.events", events)]);
        assert_eq!((found.headroom(), found.limits_reached()), (Some(-100), 7));
    }

    #[test]
    fn version_1_counts_its_children_and_has_a_large_number_for_no_limit() {
        let root = tempfile::tempdir().unwrap();
        let stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 70\ntotal_active_file 30\n";
        let no_limit = "9223372036854771712\n";
        group(root.path(), "memory", &[("memory.limit_in_bytes", no_limit), ("memory.usage_in_bytes", "5000")]);
        let files = [("memory.limit_in_bytes", "1000"), ("memory.usage_in_bytes", "700"), ("memory.stat", stat)];
        group(root.path(), "memory/a", &files);
        let found = ControlGroup::of("4:memory:/a", root.path().to_str().unwrap()).unwrap();
        assert_eq!((found.headroom(), found.limit()), (Some(400), Some(1000)));
    }
}
