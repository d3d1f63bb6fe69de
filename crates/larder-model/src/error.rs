//! The errors of this crate.

/// Why a model cannot be built or run: one sentence that names the config key, tensor or request.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// `config.json` has a value that is out of range, inconsistent or not supported.
    #[error("config.json: {0}")]
    Config(String),
    /// A tensor is missing, or its shape or format is not the one that the config calls for.
    #[error("{0}")]
    Weights(String),
    /// The tokens do not fit the vocabulary or the context.
    #[error("{0}")]
    Request(String),
    /// All memory for KV caches is in use.
    #[error("{0}")]
    KvCacheFull(String),
    /// An expert could not be read or computed; the source is the error of the cache or of the device.
    #[error("{0}")]
    Expert(#[source] Cause),
    /// A device is out of memory, or a copy or computation on it failed.
    #[error("{0}")]
    Device(#[source] Cause),
    /// The observer of the pass wanted no more of it.
    #[error("cancelled")]
    Cancelled,
}

/// The error of a crate above this one, or a text.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The result type of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

impl From<larder_core::GateError> for ModelError {
    fn from(e: larder_core::GateError) -> Self {
        ModelError::Config(e.to_string())
    }
}

impl From<larder_core::TensorsError> for ModelError {
    fn from(e: larder_core::TensorsError) -> Self {
        ModelError::Weights(e.to_string())
    }
}
