//! `tokenizer_config.json`: special tokens, decoding options, chat templates.

use serde_json::{Map, Value};

/// An invalid configuration file.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{file}: {what}")]
pub struct ConfigError {
    /// The file's usual name.
    pub file: &'static str,
    /// The problem, which completes a sentence that begins with the file's name.
    pub what: String,
}

impl ConfigError {
    pub(crate) fn new(file: &'static str, what: impl Into<String>) -> Self {
        ConfigError { file, what: what.into() }
    }
}

/// Parses a file that must be a JSON object.
pub(crate) fn json_object(file: &'static str, bytes: &[u8]) -> Result<Map<String, Value>, ConfigError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(ConfigError::new(file, "is not a JSON object")),
        Err(error) => Err(ConfigError::new(file, format!("is not valid JSON: {error}"))),
    }
}

const FILE: &str = "tokenizer_config.json";

/// The special tokens of transformers; any further key that ends in `_token` is one of the model's own.
const STANDARD: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The settings of a `tokenizer_config.json`: special tokens, decoding options, chat templates.
///
/// `add_bos_token` and `add_eos_token` are not read: with a `tokenizer.json`, whose post-processor decides,
/// transformers ignores both.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct TokenizerConfig {
    /// Special tokens by name, such as `bos_token`, in the order in which they are registered.
    pub special: Vec<(String, String)>,
    pub(crate) extra_special: Vec<String>,
    /// Tokens by id with their matching rules, sorted by id.
    pub(crate) added: Vec<(u32, tokenizers::AddedToken)>,
    pub(crate) clean_up: bool,
    pub(crate) clean_up_bpe_too: bool,
    pub(crate) split_special: bool,
    /// Chat templates by name; a single template is named `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl TokenizerConfig {
    /// Parses a `tokenizer_config.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ConfigError> {
        let json = json_object(FILE, bytes)?;
        Ok(TokenizerConfig {
            special: named_tokens(&json)?,
            extra_special: extra_tokens(&json)?,
            added: added_tokens(&json)?,
            clean_up: flag(&json, "clean_up_tokenization_spaces")?,
            clean_up_bpe_too: flag(&json, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")?,
            split_special: flag(&json, "split_special_tokens")?,
            chat_templates: chat_templates(&json)?,
        })
    }

    /// The text of a named special token, for example of `"eos_token"`.
    pub fn token(&self, name: &str) -> Option<&str> {
        self.special.iter().find(|(key, _)| key == name).map(|(_, text)| text.as_str())
    }
}

fn wrong(key: &str, expected: &str) -> ConfigError {
    ConfigError::new(FILE, format!("`{key}` is not {expected}"))
}

fn flag(json: &Map<String, Value>, key: &str) -> Result<bool, ConfigError> {
    match json.get(key) {
        None | Some(Value::Null) => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| wrong(key, "true or false")),
    }
}

/// The text of a token that may be a string or an object with `content`.
fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn named_tokens(json: &Map<String, Value>) -> Result<Vec<(String, String)>, ConfigError> {
    let mut tokens = Vec::new();
    for key in STANDARD {
        match json.get(key) {
            None | Some(Value::Null) => {}
            Some(value) => {
                let text = content(value).ok_or_else(|| wrong(key, "a token"))?;
                tokens.push((key.to_owned(), text.to_owned()));
            }
        }
    }
    let own = json.iter().filter(|(key, _)| key.ends_with("_token") && !STANDARD.contains(&key.as_str()));
    tokens.extend(own.filter_map(|(key, value)| Some((key.clone(), content(value)?.to_owned()))));
    if let Some(Value::Object(named)) = json.get("extra_special_tokens") {
        tokens.extend(named.iter().filter_map(|(key, value)| Some((key.clone(), content(value)?.to_owned()))));
    }
    Ok(tokens)
}

fn extra_tokens(json: &Map<String, Value>) -> Result<Vec<String>, ConfigError> {
    let key = match json.get("extra_special_tokens") {
        Some(Value::Array(list)) if !list.is_empty() => "extra_special_tokens",
        _ => "additional_special_tokens",
    };
    match json.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list
            .iter()
            .map(|token| content(token).map(str::to_owned).ok_or_else(|| wrong(key, "a list of tokens")))
            .collect(),
        Some(_) => Err(wrong(key, "a list of tokens")),
    }
}

fn added_tokens(json: &Map<String, Value>) -> Result<Vec<(u32, tokenizers::AddedToken)>, ConfigError> {
    const KEY: &str = "added_tokens_decoder";
    let tokens = match json.get(KEY) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(tokens)) => tokens,
        Some(_) => return Err(wrong(KEY, "an object of tokens by id")),
    };
    let mut added = tokens
        .iter()
        .map(|(id, token)| {
            let id = id.parse().map_err(|_| wrong(KEY, "an object of tokens by id"))?;
            Ok((id, added_token(token).ok_or_else(|| wrong(KEY, "an object of tokens by id"))?))
        })
        .collect::<Result<Vec<_>, ConfigError>>()?;
    added.sort_by_key(|(id, _)| *id);
    Ok(added)
}

fn added_token(token: &Value) -> Option<tokenizers::AddedToken> {
    let is = |key: &str, default| token.get(key).and_then(Value::as_bool).unwrap_or(default);
    let special = is("special", false);
    Some(tokenizers::AddedToken {
        content: token.get("content")?.as_str()?.to_owned(),
        single_word: is("single_word", false),
        lstrip: is("lstrip", false),
        rstrip: is("rstrip", false),
        normalized: is("normalized", !special),
        special,
    })
}

fn chat_templates(json: &Map<String, Value>) -> Result<Vec<(String, String)>, ConfigError> {
    const KEY: &str = "chat_template";
    match json.get(KEY) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(template)) => Ok(vec![("default".into(), template.clone())]),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                text("name").zip(text("template")).ok_or_else(|| wrong(KEY, "a list of named templates"))
            })
            .collect(),
        Some(_) => Err(wrong(KEY, "a template or a list of named templates")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<TokenizerConfig, ConfigError> {
        TokenizerConfig::from_bytes(json.as_bytes())
    }

    #[test]
    fn tokens_are_strings_or_objects_and_null_is_none() {
        let config = parse(
            r#"{"eos_token": {"__type": "AddedToken", "content": "</s>"}, "bos_token": "<s>", "pad_token": null,
                "image_token": "<img>", "add_bos_token": true}"#,
        )
        .unwrap();
        let names: Vec<_> = config.special.iter().map(|(key, text)| (key.as_str(), text.as_str())).collect();
        assert_eq!(names, [("bos_token", "<s>"), ("eos_token", "</s>"), ("image_token", "<img>")]);
        assert_eq!((config.token("eos_token"), config.token("pad_token")), (Some("</s>"), None));
    }

    #[test]
    fn added_tokens_are_sorted_by_id() {
        let config = parse(
            r#"{"added_tokens_decoder": {"10": {"content": "b", "special": true}, "9": {"content": "a", "rstrip": true}}}"#,
        )
        .unwrap();
        let ids: Vec<_> = config.added.iter().map(|(id, token)| (*id, token.content.as_str())).collect();
        assert_eq!(ids, [(9, "a"), (10, "b")]);
        assert!(config.added[0].1.normalized && config.added[0].1.rstrip && !config.added[1].1.normalized);
    }

    #[test]
    fn templates_are_one_or_a_named_list() {
        assert_eq!(parse(r#"{"chat_template": "x"}"#).unwrap().chat_templates, [("default".into(), "x".into())]);
        let list = parse(r#"{"chat_template": [{"name": "tool_use", "template": "y"}]}"#).unwrap();
        assert_eq!(list.chat_templates, [("tool_use".into(), "y".into())]);
    }

    #[test]
    fn keys_with_a_wrong_type_are_named() {
        for (json, part) in [
            ("[]", "not a JSON object"),
            ("{", "not valid JSON"),
            (r#"{"bos_token": 3}"#, "`bos_token`"),
            (r#"{"split_special_tokens": "no"}"#, "`split_special_tokens`"),
            (r#"{"additional_special_tokens": [1]}"#, "`additional_special_tokens`"),
            (r#"{"added_tokens_decoder": {"x": {"content": "a"}}}"#, "`added_tokens_decoder`"),
            (r#"{"added_tokens_decoder": {"1": {}}}"#, "`added_tokens_decoder`"),
            (r#"{"chat_template": 1}"#, "`chat_template`"),
            (r#"{"chat_template": [{"name": "a"}]}"#, "`chat_template`"),
        ] {
            let error = parse(json).unwrap_err().to_string();
            assert!(error.starts_with("tokenizer_config.json: ") && error.contains(part), "{json}: {error}");
        }
    }
}
