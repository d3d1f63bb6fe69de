use larder_model::ModelError;

/// Why a GPU cannot do what it is asked for: one sentence.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GpuError {
    /// Something that has to be installed or plugged in is not there.
    #[error("{0}")]
    Missing(String),
    /// A piece of memory cannot be had.
    #[error("{bytes} bytes do not fit into the {free_bytes} bytes of device memory that are free")]
    OutOfMemory {
        /// How many were asked for.
        bytes: u64,
        /// What there is.
        free_bytes: u64,
    },
    /// The device said no.
    #[error("{what} failed: {cause}")]
    Failed {
        /// What was tried.
        what: String,
        /// What the device said.
        cause: String,
    },
    /// The kernels do not compile for this card.
    #[error("the kernels in {file} cannot be compiled for compute capability {capability}: {cause}")]
    Kernels {
        /// Which of the sources.
        file: &'static str,
        /// For which cards.
        capability: String,
        /// What the compiler said.
        cause: String,
    },
    /// There is no kernel for it.
    #[error("{0}")]
    Unsupported(String),
}

/// The GPU's results.
pub type Result<T, E = GpuError> = std::result::Result<T, E>;

impl GpuError {
    /// That something failed, and what the device said.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub(crate) fn failed(what: impl Into<String>, cause: impl Into<String>) -> Self {
        GpuError::Failed { what: what.into(), cause: cause.into() }
    }
}

impl From<GpuError> for ModelError {
    fn from(e: GpuError) -> Self {
        ModelError::Device(e.to_string())
    }
}
