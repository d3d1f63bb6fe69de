use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use larder_core::TensorsError;

/// What kind of thing went wrong; the binary turns it into advice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreErrorKind {
    /// The system refused: not found, not allowed, an I/O error.
    Io,
    /// The target's file system is full.
    NoSpace,
    /// A file is not what its format says: truncated, overlapping, absurd.
    Malformed,
    /// Something the model needs is not there.
    Missing,
    /// Two parts that must agree do not: a shape and a config, a checksum and its bytes.
    Mismatch,
    /// Well-formed, and nothing that larder knows.
    Unsupported,
    /// Written by a newer larder.
    Newer,
    /// The target is taken or in use.
    Taken,
}

/// A failure of the store: what kind, in which file, and one sentence that says what was found there.
#[derive(Debug)]
pub struct StoreError {
    /// What kind.
    pub kind: StoreErrorKind,
    /// In which file or folder; empty if the sentence says it.
    pub path: PathBuf,
    /// The sentence, without the path.
    pub message: String,
}

/// The store's results.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

impl StoreError {
    /// A failure of `fault` at `path`.
    pub fn new(kind: StoreErrorKind, path: &Path, what: impl Into<String>) -> Self {
        StoreError { kind, path: path.to_owned(), message: what.into() }
    }

    /// A file that breaks its own format.
    pub fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Malformed, path, what)
    }

    /// What the system said while `doing` something, for example `"reading"`.
    pub fn io(path: &Path, doing: &str, error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreErrorKind::NoSpace,
            _ => StoreErrorKind::Io,
        };
        let said = error.to_string();
        let said = said.split(" (os error").next().unwrap_or_default().to_lowercase();
        Self::new(kind, path, format!("{doing} failed: {said}"))
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.path.as_os_str().is_empty() {
            return f.write_str(&self.message);
        }
        write!(f, "{}: {}", self.path.display(), self.message)
    }
}

/// The text of a [`TensorsError`] names the file already.
impl From<TensorsError> for StoreError {
    fn from(error: TensorsError) -> Self {
        StoreError { kind: StoreErrorKind::Io, path: PathBuf::new(), message: error.0 }
    }
}

impl From<StoreError> for TensorsError {
    fn from(error: StoreError) -> Self {
        TensorsError(error.to_string())
    }
}

impl std::error::Error for StoreError {}
