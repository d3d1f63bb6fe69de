//! The text decoder's config in that of a multimodal model, whose other parts are not run.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::config::{NEUTRAL_KEYS, config_error};
use crate::error::Result;

/// Configs around that of the text decoder, outermost first.
const NESTS: [&str; 2] = ["thinker_config", "text_config"];

/// The configs of parts that only other inputs and outputs than text need.
const OTHER_PARTS: &[&str] = &["audio_config", "code2wav_config", "talker_config", "vision_config"];

/// Keys beside a nested config that only other inputs and outputs than text need.
const OTHER_KEYS: &[&str] = &[
    "enable_audio_output",
    "ignore_index",
    "image_seq_length",
    "merged_hidden_size",
    "multimodal_projector_bias",
    "position_id_per_seconds",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "projector_bias",
    "projector_hidden_act",
    "projector_hidden_size",
    "spatial_merge_size",
    "use_unified_vision_chunk",
    "video_placeholder",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_soft_tokens_per_image",
];

/// Whether the output head uses the weights of the embedding; beside a nested config it overrides the one inside.
const TIED: &str = "tie_word_embeddings";

/// `config`, or the config of the text decoder that is nested in it.
///
/// Of the keys beside a nested config only `tie_word_embeddings` and `quantization_config` apply to text. One that is
/// neither known to concern other inputs nor without effect is an error.
pub fn text_config(config: &Value) -> Result<Cow<'_, Value>> {
    let mut found = Cow::Borrowed(config);
    for nest in NESTS {
        let Some(inner) = found.get(nest).filter(|inner| !inner.is_null()) else { continue };
        let inner = inner.as_object().ok_or_else(|| config_error(format!("{nest} is not an object")))?;
        let outer = found.as_object().expect("a value with a key is an object");
        found = Cow::Owned(Value::Object(joined(nest, outer, inner)?));
    }
    Ok(found)
}

/// The keys of `inner`, and those of `outer` that apply to it.
fn joined(nest: &str, outer: &Map<String, Value>, inner: &Map<String, Value>) -> Result<Map<String, Value>> {
    let mut all = inner.clone();
    for (key, value) in outer {
        let off = value.is_null() || *value == Value::Bool(false);
        match key.as_str() {
            TIED if !value.is_null() => drop(all.insert(key.clone(), value.clone())),
            "model_type" | "quantization_config" => drop(all.entry(key).or_insert_with(|| value.clone())),
            _ if key == nest || off || concerns_other_inputs(key) || NEUTRAL_KEYS.contains(&key.as_str()) => {}
            _ if inner.get(key) == Some(value) => {}
            nested if NESTS.contains(&nested) => {}
            _ => {
                let what = format!("{key}, beside {nest}, is not supported and might change the result");
                return Err(config_error(what));
            }
        }
    }
    Ok(all)
}

fn concerns_other_inputs(key: &str) -> bool {
    let a_token = key.ends_with("_token_id") || key.ends_with("_token_index");
    a_token || OTHER_PARTS.contains(&key) || OTHER_KEYS.contains(&key)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_nested_config_is_that_of_the_text_decoder() {
        let outer = json!({
            "model_type": "outer", "image_token_id": 9, "vision_config": {"hidden_size": 3}, "torch_dtype": "bfloat16",
            "tie_word_embeddings": true,
            "text_config": {"model_type": "inner", "hidden_size": 8, "tie_word_embeddings": false}
        });
        let want = json!({"model_type": "inner", "hidden_size": 8, "tie_word_embeddings": true});
        assert_eq!(*text_config(&outer).unwrap(), want);
        let omni = json!({"model_type": "omni", "talker_config": {"a": 1}, "enable_audio_output": true,
            "thinker_config": {"model_type": "thinker", "audio_config": {}, "text_config": {"hidden_size": 8}}});
        assert_eq!(*text_config(&omni).unwrap(), json!({"model_type": "thinker", "hidden_size": 8}));
        assert!(matches!(text_config(&want).unwrap(), Cow::Borrowed(_)));
    }

    #[test]
    fn a_key_beside_the_nested_config_is_known_or_refused() {
        let check = |outer: Value| text_config(&outer).map(|_| ()).map_err(|e| e.to_string());
        assert_eq!(
            check(json!({"logit_scale": 2, "text_config": {"model_type": "x"}})).unwrap_err(),
            "config.json: logit_scale, beside text_config, is not supported and might change the result"
        );
        assert!(check(json!({"logit_scale": 2, "text_config": {"logit_scale": 2}})).is_ok());
        assert!(check(json!({"logit_scale": null, "text_config": {}})).is_ok());
        assert_eq!(check(json!({"text_config": 7})).unwrap_err(), "config.json: text_config is not an object");
    }
}
