use std::path::{Path, PathBuf};

use larder_core::TraceError;
use larder_policy::spec::PolicyError;

/// Why the lab could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A trace that cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A policy that cannot be had.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The system refused.
    #[error("{}: {doing} failed: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("{} {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        why: String,
    },
    /// Settings that have no meaning.
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
