use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use crate::{
    direct::{DirectFile, WORTHWHILE_BYTES},
    error::{Result, StoreError, StoreErrorKind},
};

/// A file that is only read, at given offsets. Its length is taken once; reads beyond it are refused, and a file that
/// shrinks meanwhile gives an error instead of a fault.
pub struct ReadAt {
    file: File,
    path: PathBuf,
    len: u64,
    /// Set once the data are to be read past the page cache; `None` inside where that cannot be.
    direct: OnceLock<Option<DirectFile>>,
}

impl ReadAt {
    /// Opens `path`, which must be a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| StoreError::io(path, "opening", e))?;
        let meta = file.metadata().map_err(|e| StoreError::io(path, "opening", e))?;
        if !meta.is_file() {
            return Err(StoreError::new(StoreErrorKind::Unsupported, path, "is not a regular file"));
        }
        Ok(ReadAt { file, path: path.to_owned(), len: meta.len(), direct: OnceLock::new() })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it held nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// From now on large reads go past the page cache, where the file system allows it: they come only once.
    pub fn use_direct_io(&self) {
        self.direct.get_or_init(|| DirectFile::open(&self.path));
    }

    /// Lets the system begin to read all of it.
    pub fn advise_will_need(&self) {
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::WillNeed);
    }

    /// Fills `into` from `offset` on, or fails naming the offset.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let direct = self.direct.get().and_then(Option::as_ref).filter(|_| into.len() >= WORTHWHILE_BYTES);
        // Whatever a direct read stumbles over, the usual one succeeds or says what is wrong.
        if direct.is_some_and(|direct| direct.read(offset, into).is_ok()) {
            return Ok(());
        }
        self.file.read_exact_at(into, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => StoreError::malformed(
                &self.path,
                format!("ends before byte {}, where data were to be", offset.saturating_add(into.len() as u64)),
            ),
            _ => StoreError::io(&self.path, &format!("reading {} bytes at {offset}", into.len()), e),
        })
    }

    /// Reads `len` bytes at `offset` into a new buffer, which is only made if the file holds that many.
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

/// A small text or JSON file, or `None` if there is none. A file larger than `limit` bytes is refused.
pub fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    if !path.exists() {
        return Ok(None);
    }
    let file = ReadAt::open(path)?;
    if file.len() > limit {
        return Err(StoreError::malformed(path, format!("is {} bytes long, more than {limit}", file.len())));
    }
    file.read_vec(0, file.len()).map(Some)
}
