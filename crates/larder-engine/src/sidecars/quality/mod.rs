//! `quality.json`: what lossy routing costs a store, measured on a text by `larder tune`.

use larder_core::{DEFINITION, Geometry, printable};
use larder_policy::routing::{DialTable, Rung};
use serde::{Deserialize, Serialize};

use super::SidecarError;

mod lambda_cost;

pub use lambda_cost::{CostNote, LambdaCost, MeasuredLambda, lambda_cost_note, text_breaks};

/// Most bytes of each text in the file.
const TEXT_BYTES: usize = 200;
/// Most values of λ in the file.
const LAMBDAS_MAX: usize = 100;

/// The calibration of the strategies `prior` and `quality`.
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
    /// Number of the definition of products, which files of definition 1 do not have.
    #[serde(default = "first_definition")]
    pub definition: u32,
    /// Slots per layer.
    pub slots: usize,
    /// The eviction policy.
    pub eviction: String,
    /// Mean spread of the router logits, by MoE row: the scale Δ of `delta=calibrated`.
    pub delta: Vec<f32>,
    /// Costs of the standard `prior`, by ascending λ above 0.
    pub lambdas: Vec<MeasuredLambda>,
    /// Loss in nats per squared weight of experts in whose place others are computed, and of those others, by MoE row.
    pub substituted: Vec<f64>,
    /// Loss in nats per squared weight of experts in whose place nothing is computed, by MoE row.
    pub left_out: Vec<f64>,
    /// Loss in nats per squared weight of experts computed from smaller copies, by MoE row; empty without smaller
    /// copies.
    pub small: Vec<f64>,
    /// Bytes of a smaller copy, as a share of those of an expert.
    pub small_share: f64,
    /// The model's own choice, and then settings with rising loss.
    pub settings: Vec<MeasuredSetting>,
}

fn first_definition() -> u32 {
    1
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
        let wrong = |why: String| SidecarError(format!("was not written by `larder tune` of this version: {why}"));
        let found: QualityCalibration = serde_json::from_slice(bytes).map_err(|e| wrong(printable(&e.to_string())))?;
        if found.definition != DEFINITION {
            return Err(SidecarError(format!(
                "was measured with definition {} of products, and this larder computes by definition {DEFINITION}",
                found.definition
            )));
        }
        let (rows, experts) = (geometry.moe_layers.len(), geometry.experts);
        if (found.model_type.as_str(), found.left_out.len(), found.experts) != (model_type, rows, experts) {
            return Err(SidecarError(format!(
                "is for {} with {} layers of {} experts, but this model is {model_type} with {rows} of {experts}",
                printable(&found.model_type),
                found.left_out.len(),
                found.experts
            )));
        }
        found.check(rows).map_err(wrong)?;
        Ok(found)
    }

    /// Refuses values that no measurement has.
    fn check(&self, rows: usize) -> Result<(), String> {
        let texts = [&self.text, &self.date, &self.larder, &self.eviction];
        if texts.iter().any(|text| text.len() > TEXT_BYTES || **text != printable(text)) {
            return Err(format!("its texts must be plain and of at most {TEXT_BYTES} bytes"));
        }
        if self.delta.len() != rows || !self.delta.iter().all(|delta| delta.is_finite() && *delta >= 0.0) {
            return Err("a layer has no spread Δ that is finite and at least 0".to_owned());
        }
        if !(1..=LAMBDAS_MAX).contains(&self.lambdas.len()) || !self.lambdas.is_sorted_by(|a, b| a.lambda < b.lambda) {
            return Err(format!("it must have 1 to {LAMBDAS_MAX} values of λ, in ascending order"));
        }
        if let Some(measured) = self.lambdas.iter().find(|measured| !measured.is_possible()) {
            return Err(format!("no measurement has the values at λ = {}", measured.lambda));
        }
        self.table().problem(rows).map_or(Ok(()), |problem| Err(format!("it {problem}")))
    }

    /// The part that the strategy `quality` needs.
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
mod tests;
