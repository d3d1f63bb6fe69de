//! Memory under a real control group whose limit moves. Where control groups cannot be made, the test says so and passes.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use larder_runtime::machine::budget::{MemoryBudget, MemoryUse};
use larder_runtime::machine::{group, memory};

const MEGA: u64 = 1 << 20;

/// A control group of this test; removed when dropped.
struct TestGroup {
    dir: PathBuf,
    limit: &'static str,
}

impl TestGroup {
    /// A new group under version 1 or 2; `Err` says why there is none.
    fn new(name: &str) -> Result<Self, String> {
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
                    match group.set_limit(256 * MEGA) {
                        Ok(()) => return Ok(group),
                        Err(e) => why = format!("{}: {e}", group.dir.join(limit).display()),
                    }
                }
                Err(e) => why = format!("{}: {e}", dir.display()),
            }
        }
        Err(why)
    }

    fn set_limit(&self, bytes: u64) -> std::io::Result<()> {
        std::fs::write(self.dir.join(self.limit), bytes.to_string())
    }

    fn add(&self, child: &Child) -> std::io::Result<()> {
        std::fs::write(self.dir.join("cgroup.procs"), child.id().to_string())
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Sends a line and returns the answer.
fn ask(child: &mut Child, answers: &mut BufReader<ChildStdout>, line: &str) -> String {
    writeln!(child.stdin.as_mut().unwrap(), "{line}").unwrap();
    // The harness prints lines of its own.
    let mut answer = String::new();
    while !answer.starts_with("= ") {
        answer.clear();
        assert!(answers.read_line(&mut answer).unwrap() > 0, "the child ended early");
    }
    answer.trim_start_matches("= ").trim().to_owned()
}

#[test]
fn a_limit_that_moves_is_seen_before_memory_is_taken() {
    let group = match TestGroup::new("larder-moving-limit") {
        Ok(group) => group,
        Err(why) => {
            println!("skipped: no control group can be made here ({why})");
            return;
        }
    };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    group.add(&child).unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    let mut asked = |line: &str| ask(&mut child, &mut answers, line);

    let limit = asked("limit").parse::<u64>().unwrap();
    assert_eq!(limit, 256 * MEGA);
    let available = asked("available").parse::<u64>().unwrap();
    assert!(available > 200 * MEGA && available <= limit, "{available}");
    // Page cache of the group stays available.
    asked("fill the page cache");
    let with_cache = asked("available").parse::<u64>().unwrap();
    assert!(with_cache + 16 * MEGA > available, "{with_cache} of {available}");

    assert_eq!(asked("take 100"), "taken");
    group.set_limit(64 * MEGA).unwrap();
    let refused = asked("take 100");
    assert!(refused.contains("not enough memory for experts: 105 MB are needed"), "{refused}");
    assert!(refused.contains("less than when the memory plan was made"), "{refused}");
    assert_eq!(asked("take 20"), "taken");
    group.set_limit(256 * MEGA).unwrap();
    assert_eq!(asked("take 100"), "taken");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

/// The process in the control group: answers each line of standard input with a line that begins with `= `.
#[test]
#[ignore = "started by the other test"]
fn child() {
    let budget = MemoryBudget::new(1 << 40);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("page-cache-{}", std::process::id()));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = match line.split_once(' ') {
            None if line == "limit" => group::limit().unwrap().to_string(),
            None if line == "available" => memory::available().unwrap().to_string(),
            Some(("take", megabytes)) => {
                let bytes = megabytes.parse::<u64>().unwrap() * MEGA;
                match budget.take(MemoryUse::Experts, bytes) {
                    Ok(_) => "taken".into(),
                    Err(refused) => refused.to_string(),
                }
            }
            _ => {
                let mut cached = std::fs::File::create(&file).unwrap();
                (0..64).for_each(|_| cached.write_all(&[7; MEGA as usize]).unwrap());
                cached.sync_all().unwrap();
                "written".into()
            }
        };
        println!("= {answer}");
    }
    let _ = std::fs::remove_file(&file);
}
