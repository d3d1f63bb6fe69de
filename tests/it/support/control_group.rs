//! Control groups of tests, whose memory limits move.

use std::path::PathBuf;
use std::process::{Child, Command};

pub const MEGA: u64 = 1 << 20;

/// A control group of this test; removed when dropped.
pub struct TestGroup {
    dir: PathBuf,
    limit: &'static str,
}

impl TestGroup {
    /// A new group with a limit. `None`, and it is said why, where none can be made.
    pub fn new(name: &str, bytes: u64) -> Option<Self> {
        Self::made(name, bytes).map_err(|why| println!("skipped: no control group can be made here ({why})")).ok()
    }

    fn made(name: &str, bytes: u64) -> Result<Self, String> {
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|e| format!("/proc/self/cgroup: {e}"))?;
        let of =
            |controller: &str| own.lines().find_map(|l| Some(l.split_once(controller)?.1.trim_matches('/').to_owned()));
        let groups = [
            (of(":memory:").map(|path| PathBuf::from("/sys/fs/cgroup/memory").join(path)), "memory.limit_in_bytes"),
            (of("0::").map(|path| PathBuf::from("/sys/fs/cgroup").join(path)), "memory.max"),
        ];
        let mut why = "no control group of this process limits memory".to_owned();
        for (parent, limit) in groups {
            let Some(parent) = parent else { continue };
            let dir = parent.join(format!("{name}-{}", std::process::id()));
            match std::fs::create_dir(&dir) {
                Ok(()) => {
                    let group = TestGroup { dir, limit };
                    match group.set_limit(bytes) {
                        Ok(()) => return Ok(group),
                        Err(e) => why = format!("{}: {e}", group.dir.join(limit).display()),
                    }
                }
                Err(e) => why = format!("{}: {e}", dir.display()),
            }
        }
        Err(why)
    }

    /// Moves the limit; fails where the kernel refuses one below what is used.
    pub fn set_limit(&self, bytes: u64) -> std::io::Result<()> {
        std::fs::write(self.dir.join(self.limit), bytes.to_string())
    }

    /// Bytes that its processes use, without page cache.
    pub fn used(&self) -> u64 {
        let stat = std::fs::read_to_string(self.dir.join("memory.stat")).unwrap();
        let key = if self.limit == "memory.max" { "anon " } else { "total_rss " };
        stat.lines().find_map(|line| line.strip_prefix(key)).unwrap().parse().unwrap()
    }

    /// Moves a process into it.
    pub fn add(&self, child: &Child) -> std::io::Result<()> {
        std::fs::write(self.dir.join("cgroup.procs"), child.id().to_string())
    }
}

impl TestGroup {
    /// A command that runs a program in it, given its arguments.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("sh");
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        command.args(["-c", enter]).arg(&self.dir).arg(program);
        command
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}
