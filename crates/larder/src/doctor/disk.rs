//! Findings about the SSD: open files, io_uring, direct I/O and read throughput.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use larder_core::Xoshiro256;
use larder_os::free_bytes;
use larder_os::memory;
use larder_runtime::machine::rates::{PacedRate, ReadPattern};
use larder_store::reader::{Arena, ReaderSpec, is_android, open_files_limit};
use larder_store::{MANIFEST_FILE, Store};
use serde_json::{Value, json};

use super::Finding;
use crate::print;

/// Queue depths to measure: reads in flight.
const QUEUE_DEPTHS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Time to measure each depth.
const TIME_PER_DEPTH: Duration = Duration::from_millis(500);
/// Time in which the engine's reader finds its window.
const TIME_FOR_WINDOW: Duration = Duration::from_secs(2);
/// Without a store, a temporary file of this size is read, in reads of the size of a typical expert.
const FILE_BYTES: u64 = 256 << 20;
const EXPERT_BYTES: usize = 4 << 20;
/// Maximum memory for the slots of the measurement.
const SLOT_BYTES_MAX: u64 = 1 << 30;
/// File descriptors that the process needs beside those of shards.
const OTHER_FILES: u64 = 256;
/// Below this, the drive is no SSD or not local.
const SLOW_BYTES_PER_SECOND: f64 = 500e6;
/// A rate that is lower by this factor with more reads in flight is an anomaly.
const COLLAPSE: f64 = 3.0;

/// Files to read, with their name for the report.
struct DiskUnderTest {
    pattern: ReadPattern,
    name: String,
    shards: Option<usize>,
    /// Keeps the temporary file open while it is read.
    _file: Option<File>,
}

pub fn check(path: Option<&Path>) -> Result<Vec<Finding>> {
    let subject = subject(path.unwrap_or(Path::new(".")))?;
    let mut all = vec![open_files(open_files_limit(), subject.shards), ring(&subject.pattern)?, direct(&subject)];
    let rates = measure(&subject.pattern)?;
    all.push(throughput(subject.pattern.len, &rates));
    all.push(queue_depth(&rates));
    let queued = rates.iter().map(|at| at.depth).max().unwrap_or(1);
    all.push(read_window(subject.pattern.len, subject.pattern.paced(&ReaderSpec::AUTO, queued, TIME_FOR_WINDOW)?));
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
    let (file, path) = temporary(dir).with_context(|| dir.display().to_string())?;
    let name = format!("a temporary file in {}", dir.display());
    Ok(DiskUnderTest {
        pattern: ReadPattern::of_file(path, FILE_BYTES, EXPERT_BYTES)?,
        name,
        shards: None,
        _file: Some(file),
    })
}

/// An open file of random bytes that nothing is left of however this ends, and a path to it.
fn temporary(dir: &Path) -> Result<(File, PathBuf)> {
    let free = free_bytes(dir).unwrap_or(u64::MAX);
    if free < 2 * FILE_BYTES {
        bail!(
            "has too little free space for a temporary file of {}; name another folder with -m",
            print::bytes(FILE_BYTES)
        );
    }
    let path = dir.join(format!(".larder-doctor-{}", std::process::id()));
    let (file, path) = vanishing(path)?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let mut rng = Xoshiro256::new(0);
    for _ in 0..FILE_BYTES / size_of::<u64>() as u64 {
        out.write_all(&rng.bits().to_le_bytes())?;
    }
    out.flush()?;
    drop(out);
    file.sync_all()?;
    Ok((file, path))
}

/// A new file that is already removed from its folder, and a path to what is open.
#[cfg(unix)]
fn vanishing(path: PathBuf) -> Result<(File, PathBuf)> {
    use std::os::fd::AsRawFd;
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    let opened = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let opened = if opened.exists() { opened } else { PathBuf::from(format!("/dev/fd/{}", file.as_raw_fd())) };
    Ok((file, opened))
}

/// A new file that the system removes when it is closed.
#[cfg(windows)]
fn vanishing(path: PathBuf) -> Result<(File, PathBuf)> {
    use std::os::windows::fs::OpenOptionsExt;
    /// `FILE_FLAG_DELETE_ON_CLOSE` of the system's interface.
    const DELETE_ON_CLOSE: u32 = 0x0400_0000;
    let mut options = File::options();
    options.read(true).write(true).create_new(true).custom_flags(DELETE_ON_CLOSE);
    Ok((options.open(&path)?, path))
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
    let opened = ReaderSpec::URING.open(&pattern.files, &arena).map(|(_, how)| how);
    let works = opened.is_ok();
    let found = opened.unwrap_or_else(|refused| refused.message);
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let fix = match disabled.trim() {
        "" | "0" => "a container's seccomp profile must allow io_uring_setup, io_uring_enter and io_uring_register",
        _ => "sudo sysctl kernel.io_uring_disabled=0",
    };
    Ok(Finding::new("io_uring", found, json!({"works": works})).advise_if(
        !works && !is_android() && cfg!(target_os = "linux"),
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

/// Bytes per second with this many reads in flight.
#[derive(Clone, Copy)]
struct DepthRate {
    depth: usize,
    rate: f64,
}

fn measure(pattern: &ReadPattern) -> Result<Vec<DepthRate>> {
    let free = memory::available().map_or(SLOT_BYTES_MAX, |bytes| bytes / 4).min(SLOT_BYTES_MAX);
    let fits = |depth: &usize| *depth == 1 || *depth as u64 * pattern.len as u64 <= free;
    let measure = |depth| {
        Ok(DepthRate { depth, rate: pattern.throughput(&ReaderSpec::AUTO, depth, TIME_PER_DEPTH, usize::MAX)?.0 })
    };
    QUEUE_DEPTHS.into_iter().take_while(fits).map(measure).collect()
}

fn throughput(read_bytes: usize, rates: &[DepthRate]) -> Finding {
    let best = rates.iter().map(|at| at.rate).fold(0.0, f64::max);
    let shown: Vec<String> =
        rates.iter().map(|at| format!("{}: {}/s", at.depth, print::bytes(at.rate as u64))).collect();
    let found = format!("{} per read; by queue depth: {}", print::bytes(read_bytes as u64), shown.join(", "));
    let rows: Vec<Value> = rates.iter().map(|at| json!({"depth": at.depth, "bytes_per_second": at.rate})).collect();
    Finding::new("SSD rate", found, json!({"read_bytes": read_bytes, "rates": rows})).advise_if(
        best < SLOW_BYTES_PER_SECOND,
        format!("at {}/s, reading experts takes most of the time", print::bytes(best as u64)),
        "move the store to a local NVMe SSD, or keep more experts in memory (--cache)",
    )
}

/// A drive should not become slower with more reads in flight.
fn queue_depth(rates: &[DepthRate]) -> Finding {
    let best = rates.iter().copied().reduce(|a, b| if b.rate > a.rate { b } else { a });
    let best = best.expect("a queue depth of 1 is always measured");
    let worst =
        rates.iter().filter(|at| at.depth > best.depth).copied().reduce(|a, b| if b.rate < a.rate { b } else { a });
    let worst = worst.filter(|at| at.rate * COLLAPSE < best.rate);
    let numbers = json!({"best_depth": best.depth, "slow_depth": worst.map(|at| at.depth)});
    let finding = Finding::new("queue depth", format!("fastest with {} reads in flight", best.depth), numbers);
    let Some(worst) = worst else { return finding };
    let (slow, fast) = (print::bytes(worst.rate as u64), print::bytes(best.rate as u64));
    finding.advise_if(
        true,
        format!(
            "with {} reads in flight the drive gives {slow}/s, and {fast}/s with {}; virtual disks with a quota and drives \
             without memory of their own do this. The bytes in flight are bounded (see read window), but other programs that \
             read much at once slow this drive down",
            worst.depth, best.depth
        ),
        "compare the same command later: another program may have read too; or move the store to another drive",
    )
}

/// The bytes in flight that the engine's reader settles on.
fn read_window(read_bytes: usize, PacedRate { rate, window_bytes }: PacedRate) -> Finding {
    let reads = (window_bytes / read_bytes.max(1) as u64).max(1);
    let found = format!(
        "{} in flight, {reads} such {}, at {}/s",
        print::bytes(window_bytes),
        if reads == 1 { "read" } else { "reads" },
        print::bytes(rate as u64)
    );
    let numbers = json!({"window_bytes": window_bytes, "reads": reads, "bytes_per_second": rate});
    Finding::new("read window", found, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_temporary_file_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let subject = subject(dir.path()).unwrap();
        let names = || fs::read_dir(dir.path()).unwrap().count();
        assert!(cfg!(windows) || names() == 0, "the file has no name, but on Windows");
        assert_eq!(subject._file.as_ref().unwrap().metadata().unwrap().len(), FILE_BYTES);
        assert!(subject.pattern.throughput(&ReaderSpec::PREAD, 2, Duration::ZERO, 3).unwrap().0 > 0.0);
        drop(subject);
        assert_eq!(names(), 0);
    }

    #[test]
    fn a_rate_that_collapses_with_more_reads_in_flight_is_reported() {
        let rates = |all: [f64; 7]| -> Vec<DepthRate> {
            QUEUE_DEPTHS.into_iter().zip(all).map(|(depth, rate)| DepthRate { depth, rate }).collect()
        };
        assert!(queue_depth(&rates([1e9, 2e9, 2.4e9, 2.4e9, 2.5e9, 2e9, 1.9e9])).advice.is_none());
        let found = queue_depth(&rates([1e9, 1.5e9, 2e9, 1.9e9, 1.9e9, 1e9, 0.2e9]));
        assert_eq!(found.numbers["slow_depth"], 64);
        let means = found.advice.unwrap().means;
        assert!(
            means.contains("64 reads") && means.contains("200 MB/s") && means.contains("2.00 GB/s with 4"),
            "{means}"
        );
        assert!(queue_depth(&rates([1e9; 7])[..1]).advice.is_none());
    }

    #[test]
    fn the_window_is_told_in_bytes_and_reads() {
        let of = |window_bytes| read_window(4_000_000, PacedRate { rate: 2.5e9, window_bytes });
        assert_eq!(of(24_000_000).found, "24.0 MB in flight, 6 such reads, at 2.50 GB/s");
        assert_eq!(of(2_000_000).found, "2.00 MB in flight, 1 such read, at 2.50 GB/s");
        assert_eq!(of(24_000_000).numbers["reads"], 6);
    }

    #[test]
    fn a_window_is_found_on_a_real_disk() {
        let dir = tempfile::tempdir().unwrap();
        let subject = subject(dir.path()).unwrap();
        let paced = subject.pattern.paced(&ReaderSpec::AUTO, 16, Duration::from_millis(200)).unwrap();
        assert!(paced.rate > 0.0 && paced.window_bytes > 0);
    }

    #[test]
    fn a_low_limit_of_open_files_is_reported() {
        assert!(open_files(Some(1024), Some(2000)).advice.is_some());
        assert!(open_files(Some(1024), Some(100)).advice.is_none());
        assert!(open_files(None, None).advice.is_none());
    }
}
