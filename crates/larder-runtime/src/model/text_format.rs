//! What a text has to match, as typed: `json`, `json:FILE`, `json:{…}`, `regex:…` or `grammar:FILE`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_store::read_small;
use larder_text::TextFormat;
use serde_json::Value;

/// Largest file with a schema or a grammar.
const FILE_BYTES: u64 = 1 << 20;

/// Parses a format and reads the file that it names.
pub fn text_format(text: &str) -> Result<TextFormat> {
    match text.split_once(':') {
        None if text == "json" => Ok(TextFormat::JsonObject),
        Some(("json", schema)) if schema.trim_start().starts_with('{') => {
            Ok(TextFormat::JsonSchema(schema_of(schema.as_bytes(), "the schema")?))
        }
        Some(("json", path)) => Ok(TextFormat::JsonSchema(schema_of(&read(path)?, path)?)),
        Some(("regex", regex)) => Ok(TextFormat::Regex(regex.into())),
        Some(("grammar", path)) => {
            let grammar = String::from_utf8(read(path)?).with_context(|| format!("{path}: is not UTF-8"))?;
            Ok(TextFormat::of_grammar(&grammar))
        }
        _ => bail!("the format '{text}' is none of json, json:FILE, json:{{…}}, regex:… and grammar:FILE"),
    }
}

fn schema_of(json: &[u8], origin: &str) -> Result<Value> {
    serde_json::from_slice(json).with_context(|| format!("{origin}: is not JSON"))
}

fn read(path: &str) -> Result<Vec<u8>> {
    match read_small(Path::new(path), FILE_BYTES)? {
        Some(bytes) => Ok(bytes),
        None => bail!("{path}: not found"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_format_is_written_in_its_text_or_in_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (schema, grammar) = (file("a.json", r#"{"type": "null"}"#), file("a.gbnf", "root ::= \"a\""));
        let null = TextFormat::JsonSchema(json!({"type": "null"}));
        assert_eq!(text_format("json").unwrap(), TextFormat::JsonObject);
        assert_eq!(text_format(&format!("json:{schema}")).unwrap(), null);
        assert_eq!(text_format(r#"json:{"type": "null"}"#).unwrap(), null);
        assert_eq!(text_format("regex:a:b").unwrap(), TextFormat::Regex("a:b".into()));
        assert_eq!(text_format(&format!("grammar:{grammar}")).unwrap(), TextFormat::of_grammar("root ::= \"a\""));
        for (wrong, fault) in [
            ("yaml", "is none of json"),
            ("json:/none", "/none: not found"),
            ("json:{", "the schema: is not JSON"),
            (&format!("json:{grammar}"), "a.gbnf: is not JSON"),
        ] {
            let said = format!("{:#}", text_format(wrong).unwrap_err());
            assert!(said.contains(fault), "{said}");
        }
    }
}
