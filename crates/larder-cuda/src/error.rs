//! The error of this crate.

use larder_model::ModelError;

/// Why an operation on a GPU failed. Displays as one sentence.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GpuError {
    /// A driver, a library, a compiler or a GPU is missing.
    #[error("{0}")]
    Missing(String),
    /// An allocation of device memory failed.
    #[error("cannot allocate {bytes} bytes of device memory: {free_bytes} bytes are free")]
    OutOfMemory {
        /// Bytes requested.
        bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// An operation of the driver or of a compiler failed.
    #[error("{what} failed: {cause}")]
    Failed {
        /// The operation.
        what: String,
        /// The message of the driver or compiler.
        cause: String,
    },
    /// The kernels do not compile for this GPU.
    #[error("the kernels in {file} cannot be compiled for compute capability {capability}: {cause}")]
    Kernels {
        /// The source file.
        file: &'static str,
        /// The compute capability of the GPU.
        capability: String,
        /// The log of the compiler.
        cause: String,
    },
    /// There is no kernel for this shape or number format, or arguments do not fit.
    #[error("{0}")]
    Unsupported(String),
}

/// Results with [`GpuError`].
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

impl GpuError {
    /// An operation that failed, and the message of the driver or compiler.
    pub(crate) fn failed(what: impl Into<String>, cause: impl Into<String>) -> Self {
        GpuError::Failed { what: what.into(), cause: cause.into() }
    }
}

impl From<GpuError> for ModelError {
    fn from(e: GpuError) -> Self {
        ModelError::Device(e.into())
    }
}
