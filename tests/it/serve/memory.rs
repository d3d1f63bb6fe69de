//! Memory while the server runs: it is given back, and slots follow what is available.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use larder_store::Manifest;
use serde_json::json;

use super::api::Server;
use crate::support::control_group::{MEGA, TestGroup};
use crate::support::fixture;

/// Of which another process takes two thirds.
const GROUP_BYTES: u64 = 108 * MEGA;

/// Memory of another process is first taken, then free, and then the limit is lowered.
#[test]
fn slots_follow_the_memory_of_a_control_group_and_no_answer_changes() {
    let Some(group) = TestGroup::new("larder-elastic", GROUP_BYTES) else { return };
    let mut other = OtherProgram::start(&group);
    let mut command = group.command(env!("CARGO_BIN_EXE_larder-under-test"));
    let flags = ["--cache", "auto", "--context", "256", "--parallel", "1", "--speculate", "off"];
    let (server, _) = Server::start_by(&mut command, &fixture("../models/demo"), &flags);
    let mut answers = Vec::new();
    let mut slots = || {
        let body = json!({"prompt": "The old man", "max_tokens": 200, "temperature": 0, "ignore_eos": true});
        answers.push(server.post("/v1/completions", body).json()["choices"][0]["text"].to_string());
        server.metric("larder_expert_slots") as u64
    };
    let first = slots();
    other.end();
    let grown = until(&mut slots, |slots| slots > first + 40);
    // Version 1 refuses a limit below what is used, and version 2 would end the process: the limit follows the memory
    // that is given back. What it leaves is below the server's reserve, an eighth of what was available when it began.
    let mut limit = GROUP_BYTES;
    let mut lower = || {
        let used = group.used();
        let next = (limit - MEGA / 2).min(used + 6 * MEGA);
        if used + 2 * MEGA < next && group.set_limit(next).is_ok() {
            limit = next;
        }
    };
    let shrunk = until(|| (lower(), slots()).1, |slots| slots < grown - 40);
    group.set_limit(GROUP_BYTES).unwrap();
    let again = until(&mut slots, |slots| slots > shrunk + 40);
    println!("{first} slots, then {grown}, then {shrunk}, then {again}");
    assert!((8..200).contains(&first), "{first} slots");
    assert!(answers.iter().all(|answer| *answer == answers[0]), "an answer has changed");
    assert!(answers[0].len() > 200);
}

#[test]
fn slots_are_locked_while_they_are_in_use() {
    let Some(group) = TestGroup::new("larder-locked", GROUP_BYTES) else { return };
    let mut other = OtherProgram::start(&group);
    let mut command = group.command(env!("CARGO_BIN_EXE_larder-under-test"));
    let model = fixture("../models/demo");
    let flags = ["--cache", "auto", "--context", "256", "--parallel", "1", "-omlock"];
    let (server, said) = Server::start_by(&mut command, &model, &flags);
    // With addresses that the allocator has reserved, which become heap as it grows: their sum stays the same.
    let locked = || kilobytes(&server, "VmLck:") << 10;
    if locked() == 0 {
        return println!("skipped: memory cannot be locked here");
    }
    let slots = || {
        server.post("/v1/completions", json!({"prompt": "The old man", "max_tokens": 2}));
        server.metric("larder_expert_slots") as u64
    };
    // The number may change between the two looks, and is that of the last request.
    let both = || loop {
        let (before, locked, after) = (slots(), locked(), slots());
        if before == after {
            return (before, locked);
        }
    };
    let (first, first_locked) = both();
    let usable = first_locked.saturating_sub(reserved_and_locked(&server) << 10);
    other.end();
    until(slots, |slots| slots > first + 40);
    let (grown, grown_locked) = both();
    let expert = Manifest::read(&model).unwrap().0.slot_bytes() as u64;
    println!("{first} slots, {first_locked} bytes locked; {grown} slots, {grown_locked} bytes locked");
    assert!(grown_locked.abs_diff(first_locked + (grown - first) * expert) < MEGA);
    drop(server);
    let said = said.join().unwrap();
    let line = said.lines().find_map(|line| line.strip_prefix("locked: ")).unwrap_or_else(|| panic!("{said}"));
    let megabytes: f64 = line.strip_suffix(" MB of memory").unwrap_or_else(|| panic!("{line}")).parse().unwrap();
    assert!((megabytes * 1e6 - usable as f64).abs() < 5e6, "{line}: {usable}");
}

/// Locked addresses in kB that the server's allocator only reserves; nothing is behind them.
fn reserved_and_locked(server: &Server) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", server.child.id())).unwrap();
    let (mut reserved, mut size, mut sum) = (false, 0, 0);
    for line in smaps.lines() {
        let mut fields = line.split_whitespace();
        match (fields.next(), fields.next()) {
            (Some("Size:"), Some(kilobytes)) => size = kilobytes.parse().unwrap(),
            (Some("VmFlags:"), _) if reserved && line.contains(" lo") => sum += size,
            (Some(range), Some(access)) if range.contains('-') => reserved = access == "---p",
            _ => {}
        }
    }
    sum
}

/// A number in kB that the kernel says of the server.
fn kilobytes(server: &Server, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel says it");
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A process in the group that has taken memory.
struct OtherProgram(Child);

impl OtherProgram {
    fn start(group: &TestGroup) -> Self {
        let mut command = group.command(std::env::current_exe().unwrap().to_str().unwrap());
        command.args(["--exact", "serve::memory::other_program", "--ignored", "--nocapture"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(said.any(|line| line.unwrap().contains("taken")), "the other program ended early");
        OtherProgram(child)
    }

    fn end(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

impl Drop for OtherProgram {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
#[ignore = "started by another test"]
fn other_program() {
    let memory = vec![1u8; 68 << 20];
    println!("taken {}", memory.len());
    std::io::stdin().lines().for_each(drop);
    assert!(memory.iter().all(|byte| *byte == 1));
}

/// Calls `number` until it is as wanted, and returns it.
fn until(mut number: impl FnMut() -> u64, wanted: impl Fn(u64) -> bool) -> u64 {
    let start = Instant::now();
    loop {
        let found = number();
        if wanted(found) {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "still {found}");
    }
}

/// Tokenising takes over a hundred bytes for each byte of a text; what the allocator keeps of them would stay with the
/// server.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn memory_of_a_long_prompt_is_given_back() {
    let server = Server::start(&fixture("golden/gpt_oss"), &["--context", "100000"]);
    let mib = |name: &str| kilobytes(&server, name) >> 10;
    for _ in 0..2 {
        let said = server.post("/v1/completions", json!({"prompt": "hello wor ".repeat(140_000)})).error();
        assert!(said.contains("The prompt has 980,000 tokens"), "{said}");
    }
    let (peak, now) = (mib("VmHWM:"), mib("VmRSS:"));
    println!("peak {peak} MiB, afterwards {now} MiB");
    assert!(peak > 150, "the prompt took only {peak} MiB: is the test vacuous?");
    assert!(now < 100, "{now} MiB of {peak} are still taken");
}
