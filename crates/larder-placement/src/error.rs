//! Errors of placement planning.

use std::path::PathBuf;

/// A topology, statistics or a scenario for which no placement can be computed.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// A file cannot be read or written, or its content is invalid.
    #[error("{} {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The fault of the file; continues a sentence that begins with the path.
        reason: String,
    },
    /// The topology lacks a value or a machine that planning needs.
    #[error("{0}")]
    Topology(String),
    /// The request exceeds a limit or contradicts itself.
    #[error("{0}")]
    Invalid(String),
}
