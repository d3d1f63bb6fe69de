//! Checks of a `tokenizer.json` before the `tokenizers` crate reads it.

use serde::Deserialize;
use serde_json::Value;

use super::growth::{self, ModelSettings};

/// The parts of a `tokenizer.json` that are checked before the `tokenizers` crate reads the file, because it panics on
/// some broken files.
#[derive(Deserialize)]
pub(crate) struct TokenizerPrecheck {
    pub(crate) decoder: Option<Value>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    model: ModelSettings,
}

impl TokenizerPrecheck {
    /// Reads and checks the parts. The error completes a sentence that begins with the file's name.
    pub(crate) fn read(json: &[u8]) -> Result<Self, String> {
        let outline: Self =
            serde_json::from_slice(json).map_err(|error| format!("is not a valid tokenizer file: {error}"))?;
        if outline.normalizer.as_ref().is_some_and(is_precompiled) {
            return Err("has a Precompiled normalizer, which is not supported".into());
        }
        let [normalizer, pre_tokenizer, post_processor, decoder] =
            [&outline.normalizer, &outline.pre_tokenizer, &outline.post_processor, &outline.decoder]
                .map(Option::as_ref);
        growth::check(normalizer, pre_tokenizer, post_processor, decoder)?;
        growth::check_model(&outline.model)?;
        match post_processor.and_then(unlisted) {
            Some(token) => {
                Err(format!("has a post_processor that adds {token}, which is missing from its special_tokens"))
            }
            None => Ok(outline),
        }
    }
}

fn is_precompiled(normalizer: &Value) -> bool {
    let parts = normalizer.get("normalizers").and_then(Value::as_array);
    normalizer["type"] == "Precompiled"
        || normalizer.get("precompiled_charsmap").is_some()
        || parts.is_some_and(|parts| parts.iter().any(is_precompiled))
}

/// A token that a post-processor's template adds without listing it in its special tokens.
fn unlisted(post_processor: &Value) -> Option<&Value> {
    if let Some(parts) = post_processor.get("processors").and_then(Value::as_array) {
        return parts.iter().find_map(unlisted);
    }
    let known = post_processor.get("special_tokens");
    let pieces = ["single", "pair"].into_iter().filter_map(|key| post_processor.get(key)?.as_array()).flatten();
    pieces.filter_map(|piece| piece.get("SpecialToken")?.get("id")).find(|token| {
        let name = token.as_str().unwrap_or_default();
        known.is_none_or(|known| known.get(name).is_none_or(|entry| entry["id"] != **token))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(part: &str, value: Value) -> Result<(), String> {
        let json = json!({"model": {"vocab": {}}, part: value});
        TokenizerPrecheck::read(json.to_string().as_bytes()).map(drop)
    }

    #[test]
    fn files_that_the_crate_panics_on_are_errors() {
        let nested = json!({"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "x"}]});
        assert!(read("normalizer", nested).unwrap_err().contains("Precompiled"));
        let template = |key: &str, id: &str| {
            json!({"type": "Sequence", "processors": [{
                "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": [],
                "special_tokens": {key: {"id": id, "ids": [1], "tokens": ["<s>"]}}}]})
        };
        assert!(read("post_processor", template("</s>", "</s>")).unwrap_err().contains("\"<s>\""));
        assert!(read("post_processor", template("<s>", "</s>")).is_err());
        assert_eq!(read("post_processor", template("<s>", "<s>")), Ok(()));
    }
}
