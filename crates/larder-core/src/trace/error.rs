//! Errors of traces.

use std::path::PathBuf;

/// Why a trace cannot be read, written or changed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// An I/O error.
    #[error("{}: {doing} failed: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The operation that failed, for example `"reading"`.
        doing: &'static str,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A pass in which a token used no expert.
    #[error("in this model a token may use no expert in a layer, which a trace cannot hold; leave the trace out")]
    WithoutExperts,
    /// A file that is not a trace.
    #[error("{} is not a larder trace: {why}", path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// What shows that it is not a trace.
        why: String,
    },
    /// A trace file whose parts contradict each other.
    #[error("{} {why}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// The contradiction.
        why: String,
    },
    /// A trace in memory whose parts contradict each other.
    #[error("the trace {0}")]
    Content(String),
    /// A pass that does not fit the trace.
    #[error(
        "a pass of {tokens} tokens cannot be added to a trace of {rows} layers of {experts} experts: it has {what}"
    )]
    Misfit {
        /// The fault of the pass.
        what: &'static str,
        /// Tokens of the pass.
        tokens: usize,
        /// Layers of the trace.
        rows: usize,
        /// Experts of the trace.
        experts: usize,
    },
    /// Two traces of different models.
    #[error(
        "traces of different models cannot be joined: {} of {} experts in {} layers, and {} of {} in {}",
        first[2], first[1], first[0], second[2], second[1], second[0]
    )]
    Geometry {
        /// Layers, experts and experts per token of the first.
        first: [usize; 3],
        /// Layers, experts and experts per token of the second.
        second: [usize; 3],
    },
    /// More tokens than a trace can hold.
    #[error("a trace holds at most {} tokens", u32::MAX)]
    TooLong,
}
