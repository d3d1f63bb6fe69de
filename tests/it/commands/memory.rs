//! Memory under a real control group whose limit moves. Where control groups cannot be made, the test says so and
//! passes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use larder_os::{group, memory};
use larder_runtime::machine::budget::{MemoryBudget, MemoryUse};

use crate::support::control_group::{MEGA, TestGroup};

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
    let Some(group) = TestGroup::new("larder-moving-limit", 256 * MEGA) else { return };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "commands::memory::child", "--ignored", "--nocapture"])
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
