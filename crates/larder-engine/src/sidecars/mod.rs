//! Files beside a model for its policies; they arrive as bytes.

mod evictor;
mod quality;

pub use evictor::{EVICTOR_BYTES_MAX, EVICTOR_FILE, evictor_arrays, evictor_from_bytes};
pub use quality::{
    CostNote, LambdaCost, MeasuredLambda, MeasuredSetting, QualityCalibration, lambda_cost_note, text_breaks,
};

/// Why a file beside a model cannot be used, as the rest of a sentence that begins with the file's path.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct SidecarError(pub String);
