//! Read-only files, read at offsets.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use larder_os::{FileAt, open_regular};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        direct::{DirectFile, WORTHWHILE_BYTES},
        page_cache,
    },
};

/// A read-only file that is read at offsets. Its length is taken when it is opened. Reads beyond the end are errors,
/// also if the file was truncated meanwhile: it is not memory-mapped, so there is no SIGBUS.
pub struct ReadAt {
    file: File,
    path: PathBuf,
    len: u64,
    /// Set by [`ReadAt::use_direct_io`]; the inner value is `None` where direct I/O is not available.
    direct: OnceLock<Option<DirectFile>>,
}

impl ReadAt {
    /// Opens `path`, which must be a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => StoreError::new(StoreErrorKind::Unsupported, path, e.to_string()),
            _ => StoreError::io(path, "opening", e),
        })?;
        let meta = file.metadata().map_err(|e| StoreError::io(path, "opening", e))?;
        Ok(ReadAt { file, path: path.to_owned(), len: meta.len(), direct: OnceLock::new() })
    }

    /// The path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// From now on, large reads use direct I/O where the file system supports it, for data that are read once.
    pub fn use_direct_io(&self) {
        self.direct.get_or_init(|| DirectFile::open(&self.path));
    }

    /// Tells the kernel that reads will be short and scattered, so that it reads nothing ahead, where it can be told.
    pub fn advise_random(&self) {
        page_cache::expect_random_reads(&self.file);
    }

    /// Starts reading bytes that will be read soon, so that the SSD reads several such ranges at the same time,
    /// where the system has such a call.
    pub fn will_need(&self, offset: u64, len: usize) {
        page_cache::read_ahead(&self.file, offset, len);
    }

    /// Fills `into` from byte `offset` on, or fails with an error that names the offset.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let direct = self.direct.get().and_then(Option::as_ref).filter(|_| into.len() >= WORTHWHILE_BYTES);
        // If a direct read fails for any reason, a buffered read succeeds or reports the error.
        if direct.is_some_and(|direct| direct.read(offset, into).is_ok()) {
            return Ok(());
        }
        self.file.read_exact_at(into, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => StoreError::malformed(
                &self.path,
                format!("ends before byte {}; the file is truncated", offset.saturating_add(into.len() as u64)),
            ),
            _ => StoreError::io(&self.path, &format!("reading {} bytes at {offset}", into.len()), e),
        })
    }

    /// Reads `len` bytes at `offset` into a new buffer, which is allocated only if the file is long enough.
    pub fn read_vec(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let what = format!("is {} bytes long, too short for {len} bytes at {offset}", self.len);
            return Err(StoreError::malformed(&self.path, what));
        }
        let mut bytes = vec![0; len as usize];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }
}

/// Reads a small text or JSON file; `None` if it does not exist. A file larger than `limit` bytes is an error.
pub fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    if !path.exists() {
        return Ok(None);
    }
    let file = ReadAt::open(path)?;
    if file.len() > limit {
        return Err(StoreError::malformed(path, format!("is {} bytes long; the limit is {limit}", file.len())));
    }
    file.read_vec(0, file.len()).map(Some)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::fs::{Advice, fadvise};

    use super::*;
    use crate::files::page_cache::cached_pages;

    const BYTES: usize = 2 * WORTHWHILE_BYTES;

    /// A file of two large reads on a disk, which the page cache does not have if it can be dropped.
    fn uncached(dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, vec![7; BYTES]).unwrap();
        let file = open_regular(&path).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        path
    }

    #[test]
    fn direct_reads_leave_nothing_in_the_page_cache() {
        // The folder of the build is on a disk; the one for temporary files may be memory.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = uncached(dir.path(), "weights");
        let weights = ReadAt::open(&path).unwrap();
        weights.use_direct_io();
        if cached_pages(&path) > 0 || weights.direct.get().is_some_and(Option::is_none) {
            return println!("skipped: this file system has no direct I/O, or cannot drop its cache");
        }
        let mut bytes = vec![0; BYTES];
        weights.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 7));
        assert_eq!(cached_pages(&path), 0);
        ReadAt::open(&path).unwrap().read(0, &mut bytes).unwrap();
        assert!(cached_pages(&path) > 0, "a buffered read leaves them there, so the test sees the difference");
    }
}
