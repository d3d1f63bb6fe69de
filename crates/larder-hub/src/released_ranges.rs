//! Giving back the disk under what has been converted: holes in a file, and a record of them that is always ahead.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use larder_store::{Result, StoreError};

/// Which bytes of a file may be gone.
pub struct ReleasedRanges {
    path: PathBuf,
    record: PathBuf,
    /// Ends by beginnings; none overlaps another.
    ranges: BTreeMap<u64, u64>,
}

impl ReleasedRanges {
    /// What is known of the file at `path`, which may not be there.
    pub fn load(path: &Path) -> Result<Self> {
        let mut record = path.as_os_str().to_owned();
        record.push(".used");
        let mut released = ReleasedRanges { path: path.to_owned(), record: record.into(), ranges: BTreeMap::new() };
        if !path.exists() {
            released.forget()?;
            return Ok(released);
        }
        let text = match fs::read_to_string(&released.record) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(released),
            Err(e) => return Err(StoreError::io(&released.record, "reading", e)),
        };
        // A last line without an end was not on the disk when its bytes were still to be removed.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let parsed = line.trim_end().split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            let (start, end) =
                parsed.ok_or_else(|| StoreError::malformed(&released.record, "is not the record it was"))?;
            released.ranges.insert(start, end);
        }
        Ok(released)
    }

    /// Whether some of `range` may be gone.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// Gives the disk under `range` back.
    pub fn release(&mut self, range: Range<u64>) -> Result<()> {
        if range.is_empty() || self.touches(&range) {
            return Ok(());
        }
        let io = |e| StoreError::io(&self.record, "writing", e);
        let mut record = OpenOptions::new().create(true).append(true).open(&self.record).map_err(io)?;
        writeln!(record, "{} {}", range.start, range.end).and_then(|()| record.sync_data()).map_err(io)?;
        self.ranges.insert(range.start, range.end);
        let file = OpenOptions::new().write(true).open(&self.path);
        punch(&file.map_err(|e| StoreError::io(&self.path, "opening", e))?, &range);
        Ok(())
    }

    /// Starts over: the file is gone or will be replaced.
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

/// Makes a hole where the file system can; elsewhere the bytes stay until the file goes.
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
    fn holes_are_remembered_and_a_torn_record_is_read() {
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
        let mut torn = fs::read(&record).unwrap();
        torn.extend(b"300000 4");
        fs::write(&record, torn).unwrap();
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
