//! Layers for multi-token prediction: which architectures have one that is known, and its tensors.
//!
//! ```text
//! x = projection([rms(embedding of the next token), rms(h)])    h = output of the final norm
//! one decoder layer of the architecture, with experts
//! logits = head(rms(x))
//! ```
//!
//! The layer has the number after the last decoder layer, and names of DeepSeek-V3; a source with other names
//! translates them. Its copies of embedding and output head are not read: the models were trained with one of each.

use std::borrow::Cow;

use serde_json::Value;

use super::common::Basics;
use crate::config::{config_error, text_config};
use crate::error::Result;
use crate::stack::{Layer, MtpLayer};
use crate::weights::WeightLoader;

/// The architectures whose layer for multi-token prediction has the form above. A further one is a row here, if its
/// `build` makes a layer for the number behind the last.
const KNOWN: &[&str] = &["bailing_moe_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3"];

/// Keys of configs that count layers for multi-token prediction.
const COUNTS: [&str; 4] = ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"];

/// Refuses an architecture whose layer for multi-token prediction is not known.
pub fn check_mtp(model_type: &str) -> Result<()> {
    if KNOWN.contains(&model_type) {
        Ok(())
    } else {
        Err(config_error(format!(
            "multi-token prediction of {model_type} is not supported; that of {} is",
            KNOWN.join(", ")
        )))
    }
}

/// How many layers for multi-token prediction a model has by its config, of which the first is used; 0 if that does not
/// say.
pub fn mtp_layers(config: &Value) -> u64 {
    let config = text_config(config).map_or(Cow::Borrowed(config), |text| text.config);
    COUNTS.iter().filter_map(|key| config[*key].as_u64()).max().unwrap_or(0)
}

impl Basics {
    /// Whether a layer has experts: one of those that are `sparse`, or the layer for multi-token prediction.
    pub(super) fn has_experts(&self, sparse: &[usize], layer: usize) -> bool {
        sparse.contains(&layer) || layer >= self.layers
    }

    /// The layer after the last decoder layer, for multi-token prediction; `build_layer` builds layers by their
    /// number.
    pub(super) fn mtp_layer(
        &self,
        weights: &mut WeightLoader,
        mut build_layer: impl FnMut(&mut WeightLoader, usize) -> Result<Layer>,
    ) -> Result<MtpLayer> {
        let (prefix, hidden) = (format!("model.layers.{}", self.layers), self.hidden);
        Ok(MtpLayer {
            embedding_norm: self.norm(weights, &format!("{prefix}.enorm"), hidden)?,
            hidden_norm: self.norm(weights, &format!("{prefix}.hnorm"), hidden)?,
            projection: weights.linear(&format!("{prefix}.eh_proj"), hidden, 2 * hidden, false)?,
            layer: build_layer(weights, self.layers)?,
            norm: self.norm(weights, &format!("{prefix}.shared_head.norm"), hidden)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::arch::find;

    #[test]
    fn the_known_layers_are_of_architectures() {
        assert!(KNOWN.iter().all(|known| find(known).unwrap().model_type == *known && check_mtp(known).is_ok()));
        let refused = check_mtp("olmoe").unwrap_err().to_string();
        assert!(refused.contains("of olmoe is not supported; that of bailing_moe_v2, "), "{refused}");
    }

    #[test]
    fn layers_are_counted_by_any_key() {
        let nested = json!({"text_config": {"mtp_num_hidden_layers": 1}});
        let counts = [json!({}), json!({"num_mtp_modules": 3}), json!({"num_nextn_predict_layers": "x"}), nested];
        assert_eq!(counts.map(|config| mtp_layers(&config)), [0, 3, 0, 1]);
    }
}
