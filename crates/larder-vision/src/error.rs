//! Why a tower cannot be opened, or a picture cannot be encoded.

use larder_core::TensorsError;

use crate::decode::DecodeError;

/// Why a tower cannot be opened, or a picture cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum VisionError {
    /// A picture could not be decoded.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A tensor could not be read.
    #[error(transparent)]
    Tensors(#[from] TensorsError),
    /// A value of a config that cannot be used.
    #[error("{file}: '{key}' should be {wanted}")]
    Config {
        /// The file.
        file: &'static str,
        /// The key.
        key: &'static str,
        /// Its possible values.
        wanted: String,
    },
    /// A value of a config that is absent, of a wrong kind, or out of bounds.
    #[error("{file}: '{key}' should be {wanted}")]
    ConfigValue {
        /// The file.
        file: &'static str,
        /// The key.
        key: String,
        /// Its possible values.
        wanted: String,
    },
    /// A tensor is missing.
    #[error("the image tower has no tensor '{0}'; the file is incomplete or of another model")]
    MissingTensor(String),
    /// A tensor of a wrong shape.
    #[error("tensor '{name}' of the image tower has shape {found:?}, but should have {wanted:?}")]
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that follows from the config.
        wanted: Vec<usize>,
    },
    /// A tensor whose bytes cannot be read as they are.
    #[error("tensor '{0}' of the image tower is stored in a form that towers cannot read; use f32, f16 or bf16")]
    StoredForm(String),
    /// A weight is infinite or not a number.
    #[error("tensor '{0}' of the image tower holds a value that is not finite")]
    NotFinite(String),
    /// A model whose images cannot be encoded.
    #[error("larder has no image tower for models of type '{0}'; those of {1} see")]
    UnknownTower(String, String),
    /// One side is too long for the other.
    #[error("an image of {width} x {height} pixels is too narrow: one side may be at most 200 times the other")]
    TooNarrow {
        /// Its width.
        width: usize,
        /// Its height.
        height: usize,
    },
    /// The caller has stopped it.
    #[error("encoding the image was stopped")]
    Stopped,
}
