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
    use crate::settings::{RENAMED, SETTINGS, SettingPart};
    use crate::{CacheSize, ContextSize};
    use larder_text::TextFormat;
    use serde_json::json;

    use super::*;

    /// The error of loading with options.
    fn refused(json: &str) -> String {
        format!("{:#}", LoadOptions::from_json(json).err().unwrap_or_else(|| panic!("{json} is taken")))
    }

    #[test]
    fn options_have_the_names_of_settings() {
        let options = LoadOptions::from_json(
            r#"{"cache": "2G", "quality": "balanced", "threads": 2, "eviction": "lfu", "context": 512, "pin": true, "kv": null}"#,
        );
        let engine = options.unwrap().engine();
        assert_eq!((engine.cache.size, engine.compute.threads), (CacheSize::Bytes(2_000_000_000), 2));
        assert_eq!((engine.routing.quality_budget(), engine.context), (Some(0.01), ContextSize::Tokens(512)));
        assert!(engine.compute.pin && engine.compute.kv.is_none());
        assert_eq!(LoadOptions::from_json(" ").unwrap().engine().context, ContextSize::Auto);
        assert_eq!(GenerateOptions::from_json(r#"{"max-tokens": 3}"#).unwrap().max_tokens, 3);
    }

    #[test]
    fn each_setting_of_a_program_is_an_option() {
        for row in SETTINGS {
            let option = json!({row.name: row.example}).to_string();
            if [SettingPart::HotSet, SettingPart::Battery, SettingPart::Edge].contains(&row.part) {
                assert!(refused(&option).contains("cannot be set here"), "{option}");
            } else {
                LoadOptions::from_json(&option).unwrap_or_else(|error| panic!("{option}: {error:#}"));
            }
        }
    }

    #[test]
    fn earlier_names_say_what_they_are_now() {
        for row in RENAMED {
            let value = row.value_of("4");
            let option = json!({row.old: "4"}).to_string();
            let loaded = LoadOptions::from_json(&option).err().map(|error| format!("{error:#}"));
            let generated = GenerateOptions::from_json(&option).err().map(|error| format!("{error:#}"));
            let wanted = format!("{} is now {}: {value:?}", row.old, row.new);
            assert!(loaded.is_some_and(|said| said.contains(&wanted)), "{wanted}");
            assert!(
                generated.is_some_and(|said| said.contains(&format!("{} is now {}", row.old, row.new))),
                "{wanted}"
            );
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_a_sentence() {
        for (json, fault) in [
            ("{", "options to load are not valid"),
            (r#"{"colour": 1}"#, "there is no setting colour"),
            (r#"{"cache": "much"}"#, "cache: 'much' is not a size"),
            (r#"{"cache": "0x"}"#, "at least 1"),
            (r#"{"cache": []}"#, "cache: must be a text, a number"),
            (r#"{"threads": 0}"#, "threads: must be at least 1"),
            (r#"{"threads": 65}"#, "threads: must be at most 64"),
            (r#"{"quality": "much"}"#, "quality: must be off"),
            (r#"{"quality": "fast", "routing": "original"}"#, "cannot be given together"),
            (r#"{"routing": "best"}"#, "routing: "),
            (r#"{"eviction": "best"}"#, "eviction: "),
            (r#"{"kv": "f8"}"#, "kv: must be f32, f16 or q8_0"),
            (r#"{"device": "tpu"}"#, "device: must be cpu"),
            (r#"{"speculate": "draft=x"}"#, "for the command alone"),
            (r#"{"reader": "tape"}"#, "reader: "),
            (r#"{"prefill-tokens": 0}"#, "prefill-tokens: must be at least 1"),
        ] {
            assert!(refused(json).contains(fault), "{json}: {}", refused(json));
        }
    }

    #[test]
    fn a_text_has_one_format() {
        let format = |json: &str| GenerateOptions::from_json(json)?.text_format();
        assert_eq!(format("{}").unwrap(), None);
        assert_eq!(format(r#"{"format": "json"}"#).unwrap(), Some(TextFormat::JsonObject));
        assert_eq!(format(r#"{"format": "regex:a+"}"#).unwrap(), Some(TextFormat::Regex("a+".into())));
        assert_eq!(format(r#"{"format": {"json": {}}}"#).unwrap(), Some(TextFormat::JsonSchema(json!({}))));
        assert_eq!(format(r#"{"format": {"regex": "a"}}"#).unwrap(), Some(TextFormat::Regex("a".into())));
        assert!(format(r#"{"format": {"grammar": "root ::= \"a\""}}"#).is_ok_and(|format| format.is_some()));
        for (wrong, fault) in [
            (r#"{"format": {"regex": "a+", "json": {}}}"#, "an object with one of"),
            (r#"{"format": {"yaml": "a"}}"#, "format must have json"),
            (r#"{"format": 1}"#, "format must be a text"),
            (r#"{"format": "json", "ignore-eos": true}"#, "ignore-eos and format"),
            (r#"{"colour": 1}"#, "unknown field `colour`"),
        ] {
            assert!(format!("{:#}", format(wrong).unwrap_err()).contains(fault), "{wrong}");
        }
    }
}
