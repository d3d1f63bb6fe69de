//! `quality.json`: the calibration by which a budget of output loss is kept to, written by `larder tune`.

use larder_core::Geometry;
use larder_policy::routing::{DialTable, Rung};
use serde::{Deserialize, Serialize};

use crate::evictor_file::SidecarError;

/// The calibration of the strategy `quality`.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct QualityCalibration {
    /// The model's `model_type`.
    pub model_type: String,
    /// Experts per layer.
    pub experts: usize,
    /// Name of the text.
    pub text: String,
    /// Number of its tokens.
    pub tokens: usize,
    /// When it was made: year, month and day.
    pub date: String,
    /// The version of larder.
    pub larder: String,
    /// Slots per layer.
    pub slots: usize,
    /// The eviction policy.
    pub eviction: String,
    /// Loss in nats per squared weight of experts in whose place others are computed, and of those others, by MoE row.
    pub substituted: Vec<f64>,
    /// Loss in nats per squared weight of experts in whose place nothing is computed, by MoE row.
    pub left_out: Vec<f64>,
    /// Loss in nats per squared weight of experts computed from smaller copies, by MoE row; empty without smaller copies.
    pub small: Vec<f64>,
    /// Bytes of a smaller copy, as a share of those of an expert.
    pub small_share: f64,
    /// The model's own choice, and then settings with rising loss.
    pub settings: Vec<MeasuredSetting>,
}

/// A setting of the dial, and what was measured with it.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct MeasuredSetting {
    /// λ of the bonus for resident experts.
    pub lambda: f64,
    /// The price of reading an expert, in nats.
    pub price: f64,
    /// Mean loss of the output, in nats per token.
    pub loss: f64,
    /// That loss divided by what the factors predict.
    pub ratio: f64,
    /// Bytes read per token.
    pub bytes: f64,
    /// Time per token.
    pub milliseconds: f64,
}

impl QualityCalibration {
    /// File name in the model's folder.
    pub const FILE: &str = "quality.json";
    /// Limit of the file's size in bytes.
    pub const BYTES_MAX: u64 = 4 << 20;

    /// Parses the file, and checks that it is for a model of this type and geometry.
    pub fn from_bytes(bytes: &[u8], model_type: &str, geometry: &Geometry) -> Result<Self, SidecarError> {
        let found: QualityCalibration = serde_json::from_slice(bytes).map_err(|e| {
            SidecarError(format!("was not written by `larder tune` of this version ({e}); run it again"))
        })?;
        let (rows, experts) = (geometry.moe_layers.len(), geometry.experts);
        if (found.model_type.as_str(), found.left_out.len(), found.experts) != (model_type, rows, experts) {
            return Err(SidecarError(format!(
                "is for {} with {} layers of {} experts, but this model is {model_type} with {rows} of {experts}",
                found.model_type,
                found.left_out.len(),
                found.experts
            )));
        }
        match found.table().problem(rows) {
            None => Ok(found),
            Some(problem) => Err(SidecarError(problem.to_owned())),
        }
    }

    /// The part that the strategy needs.
    pub fn table(&self) -> DialTable {
        let rung = |setting: &MeasuredSetting| {
            let MeasuredSetting { lambda, price, loss, ratio, .. } = *setting;
            Rung { lambda, price, loss, ratio }
        };
        DialTable {
            substituted: self.substituted.clone(),
            left_out: self.left_out.clone(),
            small: self.small.clone(),
            small_share: self.small_share,
            rungs: self.settings.iter().skip(1).map(rung).collect(),
        }
    }

    /// The setting that is expected to have this loss, between two that were measured.
    pub fn at_loss(&self, loss: f64) -> MeasuredSetting {
        let Some(above) = self.settings.iter().position(|setting| setting.loss >= loss) else {
            return self.settings.last().copied().unwrap_or_default();
        };
        let (to, from) = (self.settings[above], self.settings[above.saturating_sub(1)]);
        let part = if to.loss > from.loss { (loss - from.loss) / (to.loss - from.loss) } else { 0.0 };
        let between = |from: f64, to: f64| from + part * (to - from);
        MeasuredSetting {
            lambda: between(from.lambda, to.lambda),
            price: between(from.price, to.price),
            loss: between(from.loss, to.loss),
            ratio: between(from.ratio, to.ratio),
            bytes: between(from.bytes, to.bytes),
            milliseconds: between(from.milliseconds, to.milliseconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> QualityCalibration {
        let setting =
            |price: f64, loss, bytes| MeasuredSetting { price, loss, bytes, ratio: 1.0, ..MeasuredSetting::default() };
        QualityCalibration {
            model_type: "olmoe".into(),
            experts: 4,
            substituted: vec![0.5, 1.0],
            left_out: vec![1.0, 2.0],
            settings: vec![setting(0.0, 0.0, 100.0), setting(0.1, 0.01, 60.0), setting(0.4, 0.03, 40.0)],
            ..QualityCalibration::default()
        }
    }

    #[test]
    fn a_calibration_is_read_for_its_model_only() {
        let read = |made: &QualityCalibration, kind, experts| {
            let bytes = serde_json::to_vec(made).unwrap();
            QualityCalibration::from_bytes(&bytes, kind, &Geometry::narrow(3, [0, 2], experts, 1))
        };
        let found = read(&made(), "olmoe", 4).unwrap();
        assert_eq!((found.table().rungs.len(), found.table().rungs[1].loss), (2, 0.03));
        assert!(read(&made(), "olmoe", 5).unwrap_err().to_string().contains("2 layers of 4 experts"));
        assert!(read(&made(), "mixtral", 4).is_err());
        for change in [
            |made: &mut QualityCalibration| made.left_out[1] = 0.0,
            |made: &mut QualityCalibration| made.substituted[1] = -1.0,
            |made: &mut QualityCalibration| made.small = vec![1.0],
            |made: &mut QualityCalibration| made.settings.truncate(1),
            |made: &mut QualityCalibration| made.settings.swap(1, 2),
            |made: &mut QualityCalibration| made.small_share = 2.0,
            |made: &mut QualityCalibration| made.settings[1].ratio = 0.0,
        ] {
            let mut wrong = made();
            change(&mut wrong);
            assert!(read(&wrong, "olmoe", 4).is_err(), "{wrong:?}");
        }
        let geometry = Geometry::narrow(3, [0, 2], 4, 1);
        let error = QualityCalibration::from_bytes(b"{}", "olmoe", &geometry).unwrap_err().to_string();
        assert!(error.contains("larder tune"));
    }

    #[test]
    fn settings_between_those_measured_are_interpolated() {
        let bytes = |loss| made().at_loss(loss).bytes;
        assert_eq!([0.0, 0.005, 0.01, 0.02, 0.03, 1.0].map(bytes), [100.0, 80.0, 60.0, 50.0, 40.0, 40.0]);
    }
}
