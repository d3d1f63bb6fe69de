//! Options of loading and generating, as JSON objects.

mod generate;
mod load;

use anyhow::{Context, Result};
use serde::Deserialize;

pub use generate::GenerateOptions;
pub use load::LoadOptions;

pub(crate) use load::routing_of;

/// Parses a JSON object; no text is one without fields.
fn parse<T: Default + for<'a> Deserialize<'a>>(json: &str, of: &str) -> Result<T> {
    if json.trim().is_empty() {
        return Ok(T::default());
    }
    serde_json::from_str(json).with_context(|| format!("options to {of} are not valid"))
}

#[cfg(test)]
mod tests {
    use crate::{CacheSize, ContextSize};

    use super::*;

    #[test]
    fn options_have_the_names_of_flags() {
        let options = LoadOptions::from_json(
            r#"{"cache-mem": "2G", "quality": "balanced", "threads": 2, "eviction": "lfu", "context": 512}"#,
        );
        let engine = options.unwrap().engine().unwrap();
        assert_eq!((engine.cache.size, engine.compute.threads), (CacheSize::Bytes(2_000_000_000), 2));
        assert_eq!((engine.routing.quality_budget(), engine.context), (Some(0.01), ContextSize::Tokens(512)));
        assert_eq!(LoadOptions::from_json(" ").unwrap().engine().unwrap().context, ContextSize::Auto);
        assert_eq!(GenerateOptions::from_json(r#"{"max-tokens": 3}"#).unwrap().max_tokens, 3);
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence() {
        let error = |json: &str| {
            let loaded = LoadOptions::from_json(json).and_then(|options| options.engine());
            format!("{:#}", loaded.err().unwrap())
        };
        for (json, fault) in [
            ("{", "options to load are not valid"),
            (r#"{"cache": 1}"#, "unknown field `cache`"),
            (r#"{"cache-mem": "much"}"#, "cache-mem: "),
            (r#"{"cache-mem": "1G", "cache-experts": 2}"#, "only one can be given"),
            (r#"{"cache-experts": 0}"#, "at least 1"),
            (r#"{"threads": 0}"#, "threads must be from 1"),
            (r#"{"quality": "much"}"#, "quality must be off"),
            (r#"{"quality": "fast", "routing": "original"}"#, "cannot be given together"),
            (r#"{"routing": "best"}"#, "routing: "),
            (r#"{"eviction": "best"}"#, "eviction: "),
            (r#"{"kv": "f8"}"#, "kv must be"),
            (r#"{"device": "tpu"}"#, "device must be"),
            (r#"{"speculate": "draft"}"#, "for the command alone"),
            (r#"{"reader": "tape"}"#, "reader: "),
            (r#"{"prefill-tokens": 0}"#, "prefill-tokens must be at least 1"),
        ] {
            assert!(error(json).contains(fault), "{json}: {}", error(json));
        }
    }

    #[test]
    fn a_text_has_one_format() {
        let format = |json: &str| GenerateOptions::from_json(json).unwrap().format().map_err(|e| e.to_string());
        assert_eq!(format("{}"), Ok(None));
        assert!(format(r#"{"regex": "a+"}"#).is_ok_and(|format| format.is_some()));
        assert!(format(r#"{"regex": "a+", "json-schema": {}}"#).is_err_and(|e| e.contains("only one")));
        assert!(format(r#"{"regex": "a+", "ignore-eos": true}"#).is_err_and(|e| e.contains("ignore-eos")));
    }
}
