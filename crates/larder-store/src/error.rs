//! Errors of this crate.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use larder_core::{TensorsError, printable};

/// Kinds of errors; the command-line program adds advice by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreErrorKind {
    /// An error of the operating system: not found, not permitted, I/O error.
    Io,
    /// The file system of the target is full.
    NoSpace,
    /// A file violates its format: truncated, overlapping, values out of range.
    Malformed,
    /// Something that the model needs does not exist.
    Missing,
    /// Two parts contradict each other: a shape and a config, a checksum and its bytes.
    Mismatch,
    /// Well-formed, but not supported.
    Unsupported,
    /// A store of a format that this version of larder does not read.
    OtherFormat,
    /// The target is occupied or in use.
    Taken,
    /// The drive of a store was removed while the store was open, or came back with another store.
    Removed,
}

/// An error with its kind, the file, and one sentence that says what was found there.
#[derive(Debug)]
pub struct StoreError {
    /// Kind of the error.
    pub kind: StoreErrorKind,
    /// File or folder; empty if the message names it or if there is none.
    pub path: PathBuf,
    /// The sentence without the path, for example `has no config.json`.
    pub message: String,
}

/// Result with [`StoreError`] by default.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

impl StoreError {
    /// An error of `kind` at `path`.
    pub fn new(kind: StoreErrorKind, path: &Path, what: impl Into<String>) -> Self {
        StoreError { kind, path: path.to_owned(), message: what.into() }
    }

    /// An error for a file that violates its format.
    pub fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::new(StoreErrorKind::Malformed, path, what)
    }

    /// An I/O error while `doing` something, for example `"reading"`.
    pub fn io(path: &Path, doing: &str, error: io::Error) -> Self {
        let kind = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreErrorKind::NoSpace,
            _ => StoreErrorKind::Io,
        };
        let text = error.to_string();
        // Windows ends its texts with a full stop.
        let reason = text.split(" (os error").next().unwrap_or_default().trim_end_matches('.').to_lowercase();
        let remedy = match error.kind() {
            io::ErrorKind::FileTooLarge => "; raise the limit of file sizes (`ulimit -f`), or use another file system",
            _ => "",
        };
        Self::new(kind, path, format!("{doing} failed: {reason}{remedy}"))
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.path.as_os_str().is_empty() {
            return f.write_str(&printable(&self.message));
        }
        write!(f, "{}: {}", printable(&self.path.to_string_lossy()), printable(&self.message))
    }
}

/// Leaves the path empty: the text of a [`TensorsError`] names the file.
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
