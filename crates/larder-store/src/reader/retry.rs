//! Shared by all readers: which reads are valid, which failures are retried, and the errors of the others.

use std::{io, path::PathBuf, sync::Arc};

use larder_core::SHARD_ALIGN;

use super::{ReadRequest, ShardFiles, files::OpenFile};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::io_failure::IoFailure,
};

/// Retries of failures that are not of the disk: an interruption, or a shortage in the kernel.
const TRANSIENT_RETRIES_MAX: u32 = 16;
/// Retries of disk errors. A disk may recover, but each failure can take seconds.
const DISK_RETRIES_MAX: u32 = 2;

impl ReadRequest {
    /// Bytes that are requested from the kernel: whole pages. A file may end within the last page.
    pub(super) fn aligned_len(&self) -> usize {
        self.len.next_multiple_of(SHARD_ALIGN)
    }

    fn describe(&self) -> String {
        format!("reading {} bytes at {}", self.len, self.offset)
    }

    /// Checks that the bytes fit into the slot and that the offset is aligned.
    pub(super) fn check(&self, path: impl FnOnce() -> PathBuf) -> Result<()> {
        if self.len <= self.slot.len() && self.offset.is_multiple_of(SHARD_ALIGN as u64) {
            return Ok(());
        }
        let what = format!("{} into a slot of {} bytes is not possible", self.describe(), self.slot.len());
        Err(StoreError::new(StoreErrorKind::Unsupported, &path(), what))
    }

    /// Checks the request and opens its file.
    pub(super) fn open(&self, files: &ShardFiles) -> Result<Arc<OpenFile>> {
        self.check(|| files.path(self.shard))?;
        files.get(self.shard).map_err(|e| match e.kind {
            StoreErrorKind::Removed => e,
            _ => StoreError { message: format!("{}: {}", self.describe(), e.message), ..e },
        })
    }

    /// The result of the read after an attempt that returned `got` bytes or an error; `None` if it is to be retried.
    pub(super) fn outcome(
        &self,
        path: impl FnOnce() -> PathBuf,
        got: io::Result<usize>,
        failures: &mut Failures,
    ) -> Option<Result<()>> {
        match got {
            Ok(got) if got >= self.len => Some(Ok(())),
            // The kernel may end a read early, as at an error of the disk; at the end of the file every attempt is
            // short.
            Ok(_) if failures.may_retry_disk() => None,
            Ok(got) => {
                let what = format!("{} returned only {got}: the file ends there", self.describe());
                Some(Err(StoreError::malformed(&path(), what)))
            }
            Err(e) if failures.may_retry(&e) => None,
            Err(e) => {
                let mut error = StoreError::io(&path(), &self.describe(), e);
                if failures.disk > 0 {
                    error.message += &format!(", {} times", failures.disk + 1);
                }
                Some(Err(error))
            }
        }
    }
}

/// Counts of the failed attempts at one read.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Failures {
    transient: u32,
    disk: u32,
}

impl Failures {
    /// Counts a failure; returns whether the read may be retried.
    fn may_retry(&mut self, error: &io::Error) -> bool {
        match IoFailure::of(error) {
            IoFailure::Transient => may_repeat(&mut self.transient, TRANSIENT_RETRIES_MAX),
            IoFailure::Disk => self.may_retry_disk(),
            IoFailure::Other => false,
        }
    }

    /// Counts a failure of the disk; returns whether the read may be retried.
    fn may_retry_disk(&mut self) -> bool {
        may_repeat(&mut self.disk, DISK_RETRIES_MAX)
    }
}

fn may_repeat(count: &mut u32, limit: u32) -> bool {
    let again = *count < limit;
    *count += u32::from(again);
    again
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::io_failure::{disk_error, interruption},
        reader::Arena,
    };

    fn attempts(failure: impl Fn() -> io::Error) -> (u32, String) {
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        let read = ReadRequest { shard: 0, offset: 4096, len: 100, slot, tag: 0 };
        let (mut failures, mut attempts) = (Failures::default(), 0);
        loop {
            attempts += 1;
            if let Some(result) = read.outcome(|| "p".into(), Err(failure()), &mut failures) {
                return (attempts, result.unwrap_err().to_string());
            }
        }
    }

    #[test]
    fn transient_failures_are_retried_up_to_a_limit() {
        assert_eq!(attempts(interruption).0, TRANSIENT_RETRIES_MAX + 1);
        let (count, sentence) = attempts(disk_error);
        assert_eq!(count, 3);
        assert!(sentence.starts_with("p: reading 100 bytes at 4096 failed: "), "{sentence}");
        assert!(sentence.ends_with(", 3 times"), "{sentence}");
        assert_eq!(attempts(|| io::Error::other("x")).0, 1);
    }

    #[test]
    fn interruptions_do_not_count_as_disk_errors() {
        let mut failures = Failures::default();
        assert!((0..5).all(|_| failures.may_retry(&interruption())));
        assert!((0..DISK_RETRIES_MAX).all(|_| failures.may_retry(&disk_error())));
        assert!(!failures.may_retry(&disk_error()));
    }

    #[test]
    fn a_read_succeeds_when_all_requested_bytes_were_read() {
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        let read = ReadRequest { shard: 0, offset: 0, len: 100, slot, tag: 0 };
        assert_eq!(read.aligned_len(), 4096);
        for (got, retries, good) in
            [(4096, 0, true), (100, 0, true), (99, DISK_RETRIES_MAX, false), (0, DISK_RETRIES_MAX, false)]
        {
            let mut failures = Failures::default();
            let outcome = || read.outcome(|| "p".into(), Ok(got), &mut failures);
            let outcomes: Vec<_> = std::iter::repeat_with(outcome).take(retries as usize + 1).collect();
            assert!(outcomes[..retries as usize].iter().all(Option::is_none), "{got}");
            assert_eq!(outcomes.last().unwrap().as_ref().unwrap().is_ok(), good, "{got}");
        }
        assert!(read.check(|| "p".into()).is_ok());
        assert!(ReadRequest { offset: 512, ..read }.check(|| "p".into()).is_err());
        let slot = Arena::new(1, SHARD_ALIGN).unwrap().1.remove(0);
        assert!(ReadRequest { shard: 0, offset: 0, len: 4097, slot, tag: 0 }.check(|| "p".into()).is_err());
    }
}
