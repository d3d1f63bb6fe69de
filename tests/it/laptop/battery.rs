//! Fewer threads on battery, with a folder of power supplies as the system has it.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::serve::api::Server;
use crate::support::{command, fixture, larder};

/// A folder of power supplies with an adapter and a battery.
struct Supplies(tempfile::TempDir);

impl Supplies {
    fn new(online: bool) -> Self {
        let supplies = Supplies(tempfile::tempdir().unwrap());
        for (name, kind) in [("AC", "Mains"), ("BAT0", "Battery")] {
            fs::create_dir(supplies.0.path().join(name)).unwrap();
            fs::write(supplies.0.path().join(name).join("type"), format!("{kind}\n")).unwrap();
        }
        supplies.set(online);
        supplies
    }

    fn set(&self, online: bool) {
        let (state, status) = if online { ("1", "Charging") } else { ("0", "Discharging") };
        let write = |file: &str, text: &str| fs::write(self.0.path().join(file), format!("{text}\n")).unwrap();
        write("BAT0/status", status);
        write("AC/online", state);
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Threads of a process that have run for at least this many clock ticks since `before`, by the names of compute
/// threads.
fn busy_workers(process: u32, before: &[(String, u64)]) -> usize {
    let after = worker_times(process);
    let grew = |(name, ticks): &&(String, u64)| before.iter().any(|(other, then)| other == name && ticks > &(then + 2));
    after.iter().filter(grew).count()
}

/// Name and processor time of each worker of the thread pool.
fn worker_times(process: u32) -> Vec<(String, u64)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let stat = |entry: std::io::Result<fs::DirEntry>| fs::read_to_string(entry.ok()?.path().join("stat")).ok();
    let time = |text: String| {
        let (start, end) = text.rsplit_once(')')?;
        let name = start.split_once('(')?.1.to_owned();
        let fields: Vec<&str> = end.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
        name.strip_prefix("larder-")?.parse::<u32>().ok()?;
        Some((name, ticks))
    };
    tasks.filter_map(stat).filter_map(time).collect()
}

#[test]
fn the_text_stays_the_same_while_the_power_supply_changes() {
    let supplies = Supplies::new(true);
    let folder = supplies.path().to_str().unwrap();
    // The number of threads of other tests comes last, and is the one that counts.
    let flags =
        ["--context", "512", "--cache", "8x", "-o", "threads-on-battery=1", "-o", &format!("power-supplies={folder}")];
    let (server, log) = Server::start_logged(&fixture("../models/demo"), &flags);
    let ask = || {
        let body =
            json!({"prompt": "The old man", "max_tokens": 300, "temperature": 0.9, "seed": 4, "ignore_eos": true});
        let before = worker_times(server.child.id());
        let text = server.post("/v1/completions", body).json()["choices"][0]["text"].clone();
        (text, busy_workers(server.child.id(), &before))
    };
    let (want, busy) = ask();
    assert_eq!(busy, 1, "two threads, of which one is that of the decoder");
    supplies.set(false);
    // Until the next look, in the middle of answers.
    let start = Instant::now();
    let mut rested = false;
    while start.elapsed() < Duration::from_secs(20) && !rested {
        let (text, busy) = ask();
        assert_eq!(text, want);
        rested = busy == 0;
    }
    assert!(rested, "the second thread still computes");
    supplies.set(true);
    sleep(Duration::from_secs(4));
    assert_eq!(ask(), (want, 1));
    server.stop();
    let log = log.join().unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.starts_with("power: ")).collect();
    assert_eq!(lines, ["power: on battery, 1 of 2 compute threads", "power: plugged in, 2 of 2 compute threads"]);
}

#[test]
fn run_and_chat_begin_on_battery() {
    let supplies = Supplies::new(false);
    let (model, folder) = (fixture("../models/demo"), supplies.path().to_str().unwrap());
    let flags =
        ["-m", model.to_str().unwrap(), "--threads", "2", "-n", "20", "-o", &format!("power-supplies={folder}")];
    let run = |more: &[&str]| larder(&[&["run", "-p", "The old man", "--seed", "1"], &flags[..], more].concat());
    let (plain, on_battery) = (run(&[]), run(&["-o", "threads-on-battery=1"]));
    assert_eq!(plain.stdout, on_battery.stdout);
    let said = String::from_utf8(on_battery.stderr).unwrap();
    assert!(said.contains("power: on battery, 1 of 2 compute threads\n"), "{said}");
    assert!(!String::from_utf8(plain.stderr).unwrap().contains("power: "));
    let mut chat = command();
    chat.arg("chat").args(flags).args(["-o", "threads-on-battery=7"]).stdin(Stdio::null());
    let mut child = chat.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success() && said.contains("power: on battery, 2 of 2 compute threads\n"), "{said}");
}
