//! What all readers agree on: which reads are possible, which failures pass, and what is said about the others.

use std::{fs::File, io, path::PathBuf, sync::Arc};

use larder_core::SHARD_ALIGN;
use rustix::io::Errno;

use super::{Files, Read};
use crate::error::{Fault, Result, StoreError};

/// Failures that say nothing about the disk: somebody interrupted, or the kernel was short of something.
const PASSING_FAILURES_MAX: u32 = 16;
/// A disk that failed may succeed, but each of its failures can take seconds.
const DISK_FAILURES_MAX: u32 = 2;

impl Read {
    /// What the kernel is asked for: whole pages. A file may end within the last.
    pub(super) fn wanted(&self) -> usize {
        self.len.next_multiple_of(SHARD_ALIGN)
    }

    fn describe(&self) -> String {
        format!("reading {} bytes at {}", self.len, self.offset)
    }

    /// Whether slot and offset fit.
    pub(super) fn check(&self, path: impl FnOnce() -> PathBuf) -> Result<()> {
        if self.len <= self.slot.len() && self.offset.is_multiple_of(SHARD_ALIGN as u64) {
            return Ok(());
        }
        let what = format!("{} into a slot of {} is not possible", self.describe(), self.slot.len());
        Err(StoreError::new(Fault::Unsupported, &path(), what))
    }

    /// The open file, for a read that is possible.
    pub(super) fn open(&self, files: &Files) -> Result<Arc<File>> {
        self.check(|| files.path(self.shard))?;
        files.get(self.shard).map_err(|e| StoreError { what: format!("{}: {}", self.describe(), e.what), ..e })
    }

    /// What an attempt means that `got` so many bytes: the read's result, or `None` if it is to be tried again.
    /// `failures` counts the attempts that failed before.
    pub(super) fn judge(
        &self,
        path: impl FnOnce() -> PathBuf,
        got: io::Result<usize>,
        failures: &mut u32,
    ) -> Option<Result<()>> {
        match got {
            Ok(got) if got >= self.len => Some(Ok(())),
            Ok(got) => {
                let what = format!("{} gave only {got}: the file ends there", self.describe());
                Some(Err(StoreError::malformed(&path(), what)))
            }
            Err(e) if *failures < failures_max(&e) => {
                *failures += 1;
                None
            }
            Err(e) => {
                let mut error = StoreError::io(&path(), &self.describe(), e);
                if *failures > 0 {
                    error.what += &format!(", {} times", *failures + 1);
                }
                Some(Err(error))
            }
        }
    }
}

fn failures_max(error: &io::Error) -> u32 {
    match Errno::from_io_error(error) {
        // Cancelled: the thread that submitted it has ended.
        Some(Errno::INTR | Errno::AGAIN | Errno::CANCELED) => PASSING_FAILURES_MAX,
        Some(Errno::IO) => DISK_FAILURES_MAX,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::Arena;

    fn attempts(errno: Errno) -> (u32, String) {
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        let read = Read { shard: 0, offset: 4096, len: 100, slot, tag: 0 };
        let (mut failures, mut attempts) = (0, 0);
        loop {
            attempts += 1;
            if let Some(result) = read.judge(|| "p".into(), Err(errno.into()), &mut failures) {
                return (attempts, result.unwrap_err().to_string());
            }
        }
    }

    #[test]
    fn what_passes_is_tried_again_so_many_times() {
        assert_eq!(attempts(Errno::INTR).0, PASSING_FAILURES_MAX + 1);
        assert_eq!(attempts(Errno::CANCELED).0, PASSING_FAILURES_MAX + 1);
        assert_eq!(attempts(Errno::IO), (3, "p: reading 100 bytes at 4096 failed: input/output error, 3 times".into()));
        assert_eq!(attempts(Errno::INVAL).0, 1);
    }

    #[test]
    fn a_read_ends_well_when_the_bytes_that_count_are_there() {
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        let read = Read { shard: 0, offset: 0, len: 100, slot, tag: 0 };
        assert_eq!(read.wanted(), 4096);
        for (got, good) in [(4096, true), (100, true), (99, false), (0, false)] {
            assert_eq!(read.judge(|| "p".into(), Ok(got), &mut 0).unwrap().is_ok(), good, "{got}");
        }
        assert!(read.check(|| "p".into()).is_ok());
        assert!(Read { offset: 512, ..read }.check(|| "p".into()).is_err());
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        assert!(Read { shard: 0, offset: 0, len: 4097, slot, tag: 0 }.check(|| "p".into()).is_err());
    }
}
