/// Why a model cannot be built or run: one sentence, naming the config key or tensor.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The config asks for something that cannot be.
    #[error("config.json: {0}")]
    Config(String),
    /// The weights are not what the config says.
    #[error("{0}")]
    Weights(String),
    /// The request cannot be served by this model.
    #[error("{0}")]
    Request(String),
    /// An expert could not be had.
    #[error("{0}")]
    Expert(String),
    /// A device did not do what it was asked for.
    #[error("{0}")]
    Device(String),
    /// A tensor operation failed, which a checked model does not do.
    #[error("internal tensor error: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// The model's results.
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
