//! Errors of the lab.

use std::path::{Path, PathBuf};

use larder_core::TraceError;
use larder_policy::spec::PolicyError;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// An invalid trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An unknown policy or strategy, or one without its inputs.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A failed system call.
    #[error("{}: {doing} failed: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation, as in "reading".
        doing: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file with unexpected content.
    #[error("{} {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The fault and its place, as the rest of a sentence that begins with the path.
        why: String,
    },
    /// Settings that are out of range or do not fit the trace.
    #[error("{0}")]
    InvalidInput(String),
}

impl LabError {
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(std::io::Error) -> LabError {
        move |source| LabError::Io { path: path.to_owned(), doing, source }
    }

    pub(crate) fn malformed(path: &Path, why: impl Into<String>) -> LabError {
        LabError::Malformed { path: path.to_owned(), why: why.into() }
    }
}
