//! Calibration of the strategy `prior`: the spread of each layer's router logits.

use std::fs;
use std::path::Path;

use larder_core::{ExpertId, Gate, Geometry, LayerIdx, Presence, Residency};
use larder_model::{Routed, Tap};
use larder_policy::routing::{Router, RouterInput, RoutingSpec};
use serde::{Deserialize, Serialize};

use super::agreement::MoeRows;
use crate::LabError;
use crate::export::write_atomically;

/// Limit of a calibration file's size.
const BYTES_MAX: u64 = 1 << 20;

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
    /// Reads a file of [`write`](Self::write) and checks that it is for a model of this type and geometry.
    pub fn read(path: &Path, model_type: &str, geometry: &Geometry) -> Result<Self, LabError> {
        let wrong = |why: String| LabError::malformed(path, why);
        let bytes = fs::metadata(path).map_err(LabError::io(path, "opening"))?.len();
        if bytes > BYTES_MAX {
            return Err(wrong(format!("is too large for a calibration: {bytes} bytes")));
        }
        let text = fs::read(path).map_err(LabError::io(path, "reading"))?;
        let found: Calibration = serde_json::from_slice(&text)
            .map_err(|e| wrong(format!("was not written by `larder eval calibrate`: {e}")))?;
        let (rows, experts) = (geometry.moe_layers.len(), geometry.experts);
        if (found.model_type.as_str(), found.delta.len(), found.experts) != (model_type, rows, experts) {
            return Err(wrong(format!(
                "is for {} with {} layers of {} experts, but this model is {model_type} with {rows} of {experts}",
                found.model_type,
                found.delta.len(),
                found.experts
            )));
        }
        match found.delta.iter().all(|d| d.is_finite() && *d >= 0.0) {
            true => Ok(found),
            false => Err(wrong("holds an invalid Δ: it must be finite and at least 0".into())),
        }
    }

    /// Writes the calibration as JSON, atomically.
    pub fn write(&self, path: &Path) -> Result<(), LabError> {
        write_atomically(path, |out| Ok(serde_json::to_writer_pretty(out, self)?))
    }
}

/// A tap on a model that averages the spread of each layer's router logits, as `prior` does while it runs.
pub struct LogitSpread<'a> {
    gates: Vec<&'a Gate>,
    rows: MoeRows,
    router: Box<dyn Router>,
    chosen: Vec<ExpertId>,
}

/// A cache without residents.
struct EmptyCache;

impl Residency for EmptyCache {
    fn presence(&self, _: usize, _: usize) -> Presence {
        Presence::Absent
    }
}

impl<'a> LogitSpread<'a> {
    /// A tap on a model of this geometry whose layers have these `gates`.
    pub fn new(geometry: &Geometry, gates: Vec<&'a Gate>) -> Self {
        let spec: RoutingSpec = "prior:lambda=0".parse().expect("the spec is valid");
        let router = spec.make(gates.len(), None).expect("prior with λ = 0 needs no calibration");
        LogitSpread { gates, rows: MoeRows::new(geometry), router, chosen: Vec::new() }
    }

    /// The mean spread so far, by MoE row.
    pub fn delta(&self) -> Vec<f32> {
        self.router.report().delta.iter().map(|d| *d as f32).collect()
    }
}

impl Tap for LogitSpread<'_> {
    fn routed(&mut self, layer: LayerIdx, logits: &[f32], _: &Routed) {
        let Some(row) = self.rows.of(layer) else { return };
        let gate = self.gates[row];
        for logits in logits.chunks_exact(gate.experts) {
            self.router.choose(&RouterInput { row, gate, logits, decode: true }, &EmptyCache, &mut self.chosen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(experts: usize) -> Geometry {
        let moe_layers = vec![LayerIdx(0), LayerIdx(2)];
        Geometry { layers: 3, moe_layers, experts, top_k: 1, hidden: 8, inter: 8, bias: false }
    }

    #[test]
    fn the_spread_is_the_mean_of_each_layer() {
        let gate = Gate::softmax(3, 1, false);
        let mut spread = LogitSpread::new(&geometry(3), vec![&gate; 2]);
        spread.routed(LayerIdx(0), &[1.0, 3.0, 0.0, 1.0, 2.0, 2.0], &Routed::default());
        spread.routed(LayerIdx(2), &[-1.0, 4.0, 0.0], &Routed::default());
        let delta = spread.delta();
        assert!((delta[0] - 2.0).abs() < 1e-5 && (delta[1] - 5.0).abs() < 1e-5, "{delta:?}");
    }

    #[test]
    fn a_calibration_is_read_for_its_model_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let delta = vec![1.25, 3.5];
        let made = Calibration { model_type: "olmoe".into(), experts: 4, text: "a.txt".into(), tokens: 9, delta };
        made.write(&path).unwrap();
        assert_eq!(Calibration::read(&path, "olmoe", &geometry(4)).unwrap(), made);
        let error = |kind, experts| Calibration::read(&path, kind, &geometry(experts)).unwrap_err().to_string();
        assert!(error("olmoe", 5).contains("2 layers of 4 experts"));
        assert!(error("mixtral", 4).contains("this model is mixtral"));
        Calibration { delta: vec![1.0, -1.0], ..made }.write(&path).unwrap();
        assert!(error("olmoe", 4).contains("invalid Δ"));
        fs::write(&path, "{}").unwrap();
        assert!(error("olmoe", 4).contains("larder eval calibrate"));
    }
}
