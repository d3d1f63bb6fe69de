//! The text decoder's config in that of a multimodal model, whose other parts are not run.

use std::borrow::Cow;

use larder_core::IGNORED_KEY;
use serde_json::{Map, Value};

use crate::config::{Refusal, config_error, is_neutral, is_off};
use crate::error::Result;

/// Configs around that of the text decoder, outermost first.
const NESTS: [&str; 2] = ["thinker_config", "text_config"];

/// Words in the keys beside a nested config that only other inputs and outputs than text need.
const OTHER_PARTS: [&str; 13] = [
    "vision", "image", "img", "video", "audio", "sound", "speech", "talker", "code2wav", "project", "mm_", "merge",
    "seconds",
];

/// Whether the output head uses the weights of the embedding; beside a nested config it overrides the one inside.
const TIED: &str = "tie_word_embeddings";

/// The token in place of which an image stands, which layers may read that look at tokens.
const IMAGE_TOKEN: &str = "image_token_id";

/// The config of a text decoder, and the keys around it that are refused.
pub struct TextConfig<'a> {
    /// The config.
    pub config: Cow<'a, Value>,
    /// Keys beside it.
    pub refusals: Vec<Refusal>,
}

/// `config`, or the config of the text decoder that is nested in it.
///
/// Of the keys beside a nested config only `tie_word_embeddings`, `quantization_config` and `image_token_id` apply to
/// the text decoder. One that is neither known to concern other inputs nor without effect is refused.
pub fn text_config(config: &Value) -> Result<TextConfig<'_>> {
    let (mut found, mut refusals) = (Cow::Borrowed(config), vec![]);
    for nest in NESTS {
        let Some(inner) = found.get(nest).filter(|inner| !inner.is_null()) else { continue };
        let inner = inner.as_object().ok_or_else(|| config_error(format!("{nest} is not an object")))?;
        let outer = found.as_object().expect("a value with a key is an object");
        let (all, refused) = joined(nest, outer, inner);
        refusals.extend(refused);
        found = Cow::Owned(Value::Object(all));
    }
    Ok(TextConfig { config: found, refusals })
}

/// The keys of `inner`, and those of `outer` that apply to it; and what of `outer` is refused.
fn joined(nest: &str, outer: &Map<String, Value>, inner: &Map<String, Value>) -> (Map<String, Value>, Vec<Refusal>) {
    let (mut all, mut refusals) = (inner.clone(), vec![]);
    for (key, value) in outer {
        match key.as_str() {
            TIED if !value.is_null() => drop(all.insert(key.clone(), value.clone())),
            "model_type" | "quantization_config" | IMAGE_TOKEN => drop(all.entry(key).or_insert_with(|| value.clone())),
            _ if key == nest || is_off(value) || is_neutral(key) || inner.get(key) == Some(value) => {}
            "ignore_index" => {} // of the loss
            nested if NESTS.contains(&nested) || OTHER_PARTS.iter().any(|word| nested.contains(word)) => {}
            _ => refusals.push(Refusal::unknown(key, value)),
        }
    }
    (all, refusals)
}

/// `config` without the keys that a user has it ignore, wherever they are below it.
pub fn without_ignored(config: &Value) -> Cow<'_, Value> {
    let Some(names) = config[IGNORED_KEY].as_array() else { return Cow::Borrowed(config) };
    let mut config = config.clone();
    for name in [IGNORED_KEY].into_iter().chain(names.iter().filter_map(Value::as_str)) {
        remove(&mut config, name);
    }
    Cow::Owned(config)
}

/// Removes a key, and the same below each nested config. The keys of the objects around it come before it, with dots
/// between.
fn remove(config: &mut Value, name: &str) {
    let (parents, last) = name.rsplit_once('.').unwrap_or(("", name));
    let parent = parents.split('.').filter(|key| !key.is_empty()).try_fold(&mut *config, |at, key| at.get_mut(key));
    if let Some(keys) = parent.and_then(Value::as_object_mut) {
        keys.remove(last);
    }
    for nest in NESTS {
        config.get_mut(nest).into_iter().for_each(|inner| remove(inner, name));
    }
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
        let want = json!({"model_type": "inner", "hidden_size": 8, "tie_word_embeddings": true, "image_token_id": 9});
        assert_eq!(*text_config(&outer).unwrap().config, want);
        let omni = json!({"model_type": "omni", "talker_config": {"a": 1}, "enable_audio_output": true,
            "thinker_config": {"model_type": "thinker", "audio_config": {}, "text_config": {"hidden_size": 8}}});
        assert_eq!(*text_config(&omni).unwrap().config, json!({"model_type": "thinker", "hidden_size": 8}));
        assert!(matches!(text_config(&want).unwrap().config, Cow::Borrowed(_)));
    }

    #[test]
    fn a_key_beside_the_nested_config_is_known_or_refused() {
        let refused = |outer: Value| {
            let keys = text_config(&outer).unwrap().refusals;
            keys.into_iter().map(|refusal| refusal.key).collect::<Vec<_>>()
        };
        assert_eq!(refused(json!({"logit_scale": 2, "image_scale": 2, "text_config": {}})), ["logit_scale"]);
        assert!(refused(json!({"logit_scale": 2, "text_config": {"logit_scale": 2}})).is_empty());
        assert!(refused(json!({"logit_scale": null, "text_config": {}})).is_empty());
        let error = text_config(&json!({"text_config": 7})).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "config.json: text_config is not an object");
    }

    #[test]
    fn ignored_keys_are_absent_wherever_they_are() {
        let config = json!({IGNORED_KEY: ["a", "rope.b", "none.c"], "a": 1, "rope": {"b": 2, "d": 3},
            "text_config": {"a": 4, "rope": {"b": 5}, "e": 6}});
        let want = json!({"rope": {"d": 3}, "text_config": {"rope": {}, "e": 6}});
        assert_eq!(*without_ignored(&config), want);
        assert!(matches!(without_ignored(&want), Cow::Borrowed(_)));
    }
}
