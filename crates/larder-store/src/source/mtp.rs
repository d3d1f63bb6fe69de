//! The tensors of layers for multi-token prediction (MTP), which are left out unless they are asked for.
//!
//! The first of these layers is presented as the layer behind the last, with the names of DeepSeek-V3, whatever a
//! source calls its tensors. A key of the config ([`MTP_KEY`]) says that it is used.

use larder_core::MTP_KEY;
use serde_json::Value;

use super::config_json::text_value;

/// Names that other checkpoints have for tensors of the layer, and those of DeepSeek-V3 below the layer's prefix.
const NAMES: [(&str, &str); 5] = [
    ("mtp.layers.0.", ""),
    ("mtp.fc.", "eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.norm.", "shared_head.norm."),
];

/// Whether a config says that the layer for multi-token prediction is used.
pub(crate) fn uses_mtp(config: &Value) -> bool {
    *text_value(config, MTP_KEY) == Value::Bool(true)
}

/// Makes a config say whether the layer for multi-token prediction is used, in the part that describes the text
/// decoder.
pub(crate) fn set_mtp(config: &mut Value, used: bool) {
    let paths: [&[&str]; 3] = [&["thinker_config", "text_config"], &["text_config"], &[]];
    let nest = |path: &[&str]| path.iter().fold(String::new(), |all, key| format!("{all}/{key}"));
    let path = paths.into_iter().map(nest).find(|path| config.pointer(path).is_some_and(Value::is_object));
    let Some(keys) = path.and_then(|path| config.pointer_mut(&path)?.as_object_mut()) else { return };
    if used { _ = keys.insert(MTP_KEY.to_owned(), Value::Bool(true)) } else { _ = keys.remove(MTP_KEY) }
}

/// Whether a tensor belongs to a layer for multi-token prediction: `mtp.…`, or a layer behind the last of `layers`.
pub(super) fn is_prediction(name: &str, layers: u64) -> bool {
    name.starts_with("mtp.") || layer_of(name).is_some_and(|layer| layer >= layers)
}

/// Whether a tensor belongs to the first layer for multi-token prediction, under its name behind `layers` layers, and
/// is used.
pub(super) fn is_used(name: &str, layers: u64) -> bool {
    let is_copy = name.contains(".embed_tokens.") || name.contains(".shared_head.head.");
    layer_of(name) == Some(layers) && !is_copy
}

/// The name behind `layers` layers of a tensor for multi-token prediction that another name is known for.
pub(super) fn usual_name(name: &str, layers: u64) -> Option<String> {
    let renamed =
        NAMES.iter().find_map(|(from, to)| Some(format!("model.layers.{layers}.{to}{}", name.strip_prefix(from)?)));
    renamed.or_else(|| {
        let rest = name.strip_prefix(&format!("model.layers.{layers}.final_layernorm."))?;
        Some(format!("model.layers.{layers}.shared_head.norm.{rest}"))
    })
}

fn layer_of(name: &str) -> Option<u64> {
    name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

/// The note about `tensors` tensors for multi-token prediction that are not used; `None` if there are none.
pub(super) fn prediction_note(tensors: usize) -> Option<String> {
    match tensors {
        0 => None,
        1 => Some("a tensor for multi-token prediction is not used".into()),
        n => Some(format!("{n} tensors for multi-token prediction are not used")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_key_stands_in_the_part_of_the_text_decoder() {
        let set = |mut config: Value| {
            set_mtp(&mut config, true);
            assert!(uses_mtp(&config) || !config.is_object());
            let with = config.clone();
            set_mtp(&mut config, false);
            (with, config)
        };
        assert_eq!(set(json!({})), (json!({"larder_mtp": true}), json!({})));
        let (nested, without) = (json!({"text_config": {"larder_mtp": true}}), json!({"text_config": {}}));
        assert_eq!(set(without.clone()), (nested, without));
        assert_eq!(set(json!(7)), (json!(7), json!(7)));
        assert!(!uses_mtp(&json!({"larder_mtp": "true"})));
    }

    #[test]
    fn other_names_are_those_of_the_layer_behind_the_last() {
        let usual = |name: &str| usual_name(name, 4).unwrap_or_default();
        assert_eq!(usual("mtp.fc.weight"), "model.layers.4.eh_proj.weight");
        assert_eq!(usual("mtp.layers.0.mlp.gate.weight"), "model.layers.4.mlp.gate.weight");
        assert_eq!(usual("mtp.norm.weight"), "model.layers.4.shared_head.norm.weight");
        assert_eq!(usual("model.layers.4.final_layernorm.weight"), "model.layers.4.shared_head.norm.weight");
        for other in
            ["mtp.layers.1.mlp.gate.weight", "model.layers.4.enorm.weight", "model.layers.3.final_layernorm.weight"]
        {
            assert_eq!(usual(other), "", "{other}");
        }
        assert!(is_used("model.layers.4.enorm.weight", 4) && !is_used("model.layers.5.enorm.weight", 4));
        assert!(
            !is_used("model.layers.4.embed_tokens.weight", 4) && !is_used("model.layers.4.shared_head.head.weight", 4)
        );
    }
}
