use std::path::PathBuf;

/// Machines, statistics or settings that nothing can be planned with.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// A file cannot be read or written, or does not say what it should.
    #[error("{} {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The machines, as they are described, cannot serve.
    #[error("{0}")]
    Topology(String),
    /// What is asked for cannot be computed.
    #[error("{0}")]
    Invalid(String),
}
