//! `calibration.json`: the spread of each layer's router logits, which the routing strategy `prior` is scaled by.

use larder_core::Geometry;
use serde::{Deserialize, Serialize};

use crate::evictor_file::SidecarError;

/// The spread Δ of each layer's router logits, measured on a text.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Calibration {
    /// The model's `model_type`.
    pub model_type: String,
    /// Experts per layer.
    pub experts: usize,
    /// Name of the text.
    pub text: String,
    /// Number of tokens.
    pub tokens: usize,
    /// Δ by MoE row.
    pub delta: Vec<f32>,
}

impl Calibration {
    /// File name in the model's folder.
    pub const FILE: &str = "calibration.json";
    /// Limit of the file's size in bytes.
    pub const BYTES_MAX: u64 = 1 << 20;

    /// Parses the file, and checks that it is for a model of this type and geometry.
    pub fn from_bytes(bytes: &[u8], model_type: &str, geometry: &Geometry) -> Result<Self, SidecarError> {
        let found: Calibration = serde_json::from_slice(bytes)
            .map_err(|e| SidecarError(format!("was not written by `larder eval calibrate`: {e}")))?;
        let (rows, experts) = (geometry.moe_layers.len(), geometry.experts);
        if (found.model_type.as_str(), found.delta.len(), found.experts) != (model_type, rows, experts) {
            return Err(SidecarError(format!(
                "is for {} with {} layers of {} experts, but this model is {model_type} with {rows} of {experts}",
                found.model_type,
                found.delta.len(),
                found.experts
            )));
        }
        match found.delta.iter().all(|d| d.is_finite() && *d >= 0.0) {
            true => Ok(found),
            false => Err(SidecarError("holds an invalid Δ: it must be finite and at least 0".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_is_read_for_its_model_only() {
        let made =
            |delta| Calibration { model_type: "olmoe".into(), experts: 4, text: "a.txt".into(), tokens: 9, delta };
        let file = |delta| serde_json::to_vec(&made(delta)).unwrap();
        let good = file(vec![1.25, 3.5]);
        assert_eq!(
            Calibration::from_bytes(&good, "olmoe", &Geometry::narrow(3, [0, 2], 4, 1)).unwrap(),
            made(vec![1.25, 3.5])
        );
        let error = |bytes: &[u8], kind, experts| {
            Calibration::from_bytes(bytes, kind, &Geometry::narrow(3, [0, 2], experts, 1)).unwrap_err().to_string()
        };
        assert!(error(&good, "olmoe", 5).contains("2 layers of 4 experts"));
        assert!(error(&good, "mixtral", 4).contains("this model is mixtral"));
        assert!(error(&file(vec![1.0, -1.0]), "olmoe", 4).contains("invalid Δ"));
        assert!(error(b"{}", "olmoe", 4).contains("larder eval calibrate"));
    }
}
