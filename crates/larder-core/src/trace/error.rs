use std::path::PathBuf;

/// A trace that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
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
    /// A file of another kind.
    #[error("{} is not a trace of larder: {why}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What gives it away.
        why: String,
    },
    /// A trace whose parts do not agree.
    #[error("{} {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What does not agree.
        why: String,
    },
    /// The same of a trace that is in memory.
    #[error("the trace {0}")]
    Content(String),
    /// A pass that cannot be added.
    #[error(
        "a pass of {tokens} tokens cannot be added to a trace of {rows} layers of {experts} experts: it has {what}"
    )]
    Misfit {
        /// What is wrong with it.
        what: &'static str,
        /// Its tokens.
        tokens: usize,
        /// Layers of the trace.
        rows: usize,
        /// Experts of the trace.
        experts: usize,
    },
    /// Two traces of different models.
    #[error(
        "traces of different models cannot be joined: {} of {} experts in {} layers, and {} of {} in {}",
        ours[2], ours[1], ours[0], theirs[2], theirs[1], theirs[0]
    )]
    Geometry {
        /// Layers, experts and experts per token of the first.
        ours: [usize; 3],
        /// The same of the second.
        theirs: [usize; 3],
    },
    /// More tokens than are counted.
    #[error("a trace holds at most {} tokens", u32::MAX)]
    TooLong,
}
