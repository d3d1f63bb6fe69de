use std::path::PathBuf;

/// Machines, statistics or settings that nothing can be planned with.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// A file cannot be read or written, or does not say what it should.
    #[error("{} {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The machines, as they are described, cannot serve.
    #[error("{0}")]
    Topology(String),
    /// What is asked for cannot be computed.
    #[error("{0}")]
    Impossible(String),
}
