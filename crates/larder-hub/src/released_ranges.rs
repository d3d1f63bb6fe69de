//! Releases the disk space of converted bytes: punches holes into a file, after recording them.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use larder_os::{open_regular_with, read_regular_text};
use larder_store::{Result, StoreError};

/// Maximum length of a record: a line for each of 2 million tensors.
const RECORD_BYTES: u64 = 64 << 20;

/// The ranges of a file whose bytes may be released.
pub struct ReleasedRanges {
    path: PathBuf,
    record: PathBuf,
    /// End of each range by its start; ranges do not overlap.
    ranges: BTreeMap<u64, u64>,
}

impl ReleasedRanges {
    /// Reads the record for the file at `path`, which need not exist.
    pub fn load(path: &Path) -> Result<Self> {
        let mut record = path.as_os_str().to_owned();
        record.push(".used");
        let mut released = ReleasedRanges { path: path.to_owned(), record: record.into(), ranges: BTreeMap::new() };
        if !path.exists() {
            released.forget()?;
            return Ok(released);
        }
        let text = match read_regular_text(&released.record, RECORD_BYTES) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(released),
            Err(e) => return Err(StoreError::io(&released.record, "reading", e)),
        };
        // An incomplete last line was not synced, so its bytes were not released yet.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let parsed = line.trim_end().split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            let (start, end) = parsed
                .ok_or_else(|| StoreError::malformed(&released.record, "is not a valid record of released ranges"))?;
            released.ranges.insert(start, end);
        }
        Ok(released)
    }

    /// Whether no bytes were released.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether some bytes of `range` may be released.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// Releases the disk space of `range`.
    pub fn release(&mut self, range: Range<u64>) -> Result<()> {
        if range.is_empty() || self.touches(&range) {
            return Ok(());
        }
        let io = |e| StoreError::io(&self.record, "writing", e);
        let mut record = open_regular_with(OpenOptions::new().create(true).append(true), &self.record).map_err(io)?;
        writeln!(record, "{} {}", range.start, range.end).and_then(|()| record.sync_data()).map_err(io)?;
        self.ranges.insert(range.start, range.end);
        let file = open_regular_with(OpenOptions::new().write(true), &self.path);
        punch(&file.map_err(|e| StoreError::io(&self.path, "opening", e))?, &range);
        Ok(())
    }

    /// Removes the file and its record, to start over.
    pub fn forget(&mut self) -> Result<()> {
        self.ranges.clear();
        for path in [&self.path, &self.record] {
            match fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(StoreError::io(path, "removing", e)),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Punches a hole if the file system supports it; if not, the bytes stay until the file is removed.
#[cfg(target_os = "linux")]
fn punch(file: &File, range: &Range<u64>) {
    use rustix::fs::{FallocateFlags, fallocate};
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let _ = fallocate(file, flags, range.start, range.end - range.start);
}

#[cfg(not(target_os = "linux"))]
fn punch(_: &File, _: &Range<u64>) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_recorded_and_an_incomplete_record_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        let mut released = ReleasedRanges::load(&path).unwrap();
        released.release(4096..8192).unwrap();
        released.release(0..0).unwrap();
        released.release(100_000..200_000).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        assert_eq!(fs::read(&path).unwrap()[8192], 7);
        let record = dir.path().join("f.used");
        let mut incomplete = fs::read(&record).unwrap();
        incomplete.extend(b"300000 4");
        fs::write(&record, incomplete).unwrap();
        let released = ReleasedRanges::load(&path).unwrap();
        assert!(
            released.touches(&(8191..9000)) && released.touches(&(0..5000)) && released.touches(&(150_000..150_001))
        );
        assert!(
            !released.touches(&(8192..100_000))
                && !released.touches(&(0..4096))
                && !released.touches(&(300_000..400_000))
        );
        fs::remove_file(&path).unwrap();
        assert!(!ReleasedRanges::load(&path).unwrap().touches(&(0..u64::MAX)));
        assert!(!record.exists());
    }
}
