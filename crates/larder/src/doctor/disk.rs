//! Findings about the SSD: open files, io_uring, direct I/O and read throughput.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use larder_engine::Xoshiro256;
use larder_runtime::machine::memory;
use larder_runtime::machine::rates::ReadPattern;
use larder_store::reader::{Arena, is_android, open_reader};
use larder_store::{MANIFEST_FILE, Store};
use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use super::Finding;
use crate::print;

/// Queue depths to measure: reads in flight.
const QUEUE_DEPTHS: [usize; 4] = [1, 4, 16, 64];
/// Time to measure each depth.
const TIME_PER_DEPTH: Duration = Duration::from_millis(700);
/// Without a store, a temporary file of this size is read, in reads of the size of a typical expert.
const FILE_BYTES: u64 = 256 << 20;
const EXPERT_BYTES: usize = 4 << 20;
/// Maximum memory for the slots of the measurement.
const SLOT_BYTES_MAX: u64 = 1 << 30;
/// File descriptors that the process needs beside those of shards.
const OTHER_FILES: u64 = 256;
/// Below this, the drive is no SSD or not local.
const SLOW_BYTES_PER_SECOND: f64 = 500e6;

/// Files to read, with their name for the report.
struct DiskUnderTest {
    pattern: ReadPattern,
    name: String,
    shards: Option<usize>,
    /// Keeps the temporary file open while it is read.
    _file: Option<File>,
}

pub fn check(path: Option<&Path>) -> Result<Vec<Finding>> {
    let files = getrlimit(Resource::Nofile);
    let subject = subject(path.unwrap_or(Path::new(".")))?;
    let mut all = vec![open_files(files.maximum, subject.shards), ring(&subject.pattern)?, direct(&subject)];
    all.push(rates(&subject)?);
    Ok(all)
}

fn subject(path: &Path) -> Result<DiskUnderTest> {
    if path.join(MANIFEST_FILE).exists() {
        let store = Arc::new(Store::open(path)?);
        let (shards, name) = (Some(store.manifest().geometry.expert_count()), path.display().to_string());
        return Ok(DiskUnderTest { pattern: ReadPattern::of_store(&store)?, name, shards, _file: None });
    }
    let kind = fs::metadata(path).with_context(|| path.display().to_string())?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let dir = if kind.is_dir() { path } else { parent.unwrap_or(Path::new(".")) };
    let file = temporary(dir).with_context(|| dir.display().to_string())?;
    let name = format!("a temporary file in {}", dir.display());
    // The file is already deleted, so nothing is left behind however this ends.
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let path = if path.exists() { path } else { PathBuf::from(format!("/dev/fd/{}", file.as_raw_fd())) };
    Ok(DiskUnderTest {
        pattern: ReadPattern::of_file(path, FILE_BYTES, EXPERT_BYTES)?,
        name,
        shards: None,
        _file: Some(file),
    })
}

/// An open file of random bytes that is already removed from its folder.
fn temporary(dir: &Path) -> Result<File> {
    let free = statvfs(dir).map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize)).unwrap_or(u64::MAX);
    if free < 2 * FILE_BYTES {
        bail!(
            "has too little free space for a temporary file of {}; name another folder with -m",
            print::bytes(FILE_BYTES)
        );
    }
    let path = dir.join(format!(".larder-doctor-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let mut rng = Xoshiro256::new(0);
    for _ in 0..FILE_BYTES / size_of::<u64>() as u64 {
        out.write_all(&rng.bits().to_le_bytes())?;
    }
    out.flush()?;
    drop(out);
    file.sync_all()?;
    Ok(file)
}

fn open_files(limit: Option<u64>, shards: Option<usize>) -> Finding {
    let wanted = shards.map_or(4096, |shards| shards as u64 + OTHER_FILES);
    let found = limit.map_or("no limit".into(), |limit| format!("at most {limit}"));
    let numbers = json!({"limit": limit, "shards": shards});
    Finding::new("open files", found, numbers).advise_if(
        limit.is_some_and(|limit| limit < wanted),
        format!("a store has a file per expert, {wanted} in total, which cannot all stay open, so they are opened and closed in turn"),
        "`* - nofile 65536` in /etc/security/limits.conf and a new login; a container's limit is --ulimit nofile=65536",
    )
}

fn ring(pattern: &ReadPattern) -> Result<Finding> {
    let (arena, _slots) = Arena::new(1, EXPERT_BYTES).context("not enough memory for one slot")?;
    let opened = open_reader("uring", &pattern.files, &arena).map(|(_, how)| how);
    let works = opened.is_ok();
    let found = opened.unwrap_or_else(|refused| refused.message);
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let fix = match disabled.trim() {
        "" | "0" => "a container's seccomp profile must allow io_uring_setup, io_uring_enter and io_uring_register",
        _ => "sudo sysctl kernel.io_uring_disabled=0",
    };
    Ok(Finding::new("io_uring", found, json!({"works": works})).advise_if(
        !works && !is_android(),
        "a thread pool reads instead, which costs a little more CPU time",
        fix,
    ))
}

fn direct(subject: &DiskUnderTest) -> Finding {
    let direct = subject.pattern.files.is_direct();
    let found = format!("{}: {}", subject.name, subject.pattern.files.read_mode());
    Finding::new("direct I/O", found, json!({"works": direct, "where": subject.name})).advise_if(
        !direct,
        "reads go through the page cache, which takes memory from the expert cache; the rates below may be those of memory",
        "keep the store on a local file system such as ext4, XFS or Btrfs",
    )
}

fn rates(subject: &DiskUnderTest) -> Result<Finding> {
    let pattern = &subject.pattern;
    let free = memory::available().map_or(SLOT_BYTES_MAX, |bytes| bytes / 4).min(SLOT_BYTES_MAX);
    let mut rates: Vec<(usize, f64)> = Vec::new();
    for depth in QUEUE_DEPTHS {
        if depth > 1 && depth as u64 * pattern.len as u64 > free {
            break;
        }
        rates.push((depth, pattern.throughput("auto", depth, TIME_PER_DEPTH, usize::MAX)?.0));
    }
    let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let shown: Vec<String> =
        rates.iter().map(|(depth, rate)| format!("{depth}: {}/s", print::bytes(*rate as u64))).collect();
    let found = format!("{} per read; by queue depth: {}", print::bytes(pattern.len as u64), shown.join(", "));
    let rows: Vec<Value> =
        rates.iter().map(|(depth, rate)| json!({"depth": depth, "bytes_per_second": rate})).collect();
    let numbers = json!({"read_bytes": pattern.len, "rates": rows});
    Ok(Finding::new("SSD rate", found, numbers).advise_if(
        best < SLOW_BYTES_PER_SECOND,
        format!("at {}/s, reading experts takes most of the time", print::bytes(best as u64)),
        "move the store to a local NVMe SSD, or keep more experts in memory (--cache-mem)",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_temporary_file_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let subject = subject(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(subject._file.as_ref().unwrap().metadata().unwrap().len(), FILE_BYTES);
        assert!(subject.pattern.throughput("pread", 2, Duration::ZERO, 3).unwrap().0 > 0.0);
    }

    #[test]
    fn a_low_limit_of_open_files_is_reported() {
        assert!(open_files(Some(1024), Some(2000)).advice.is_some());
        assert!(open_files(Some(1024), Some(100)).advice.is_none());
        assert!(open_files(None, None).advice.is_none());
    }
}
