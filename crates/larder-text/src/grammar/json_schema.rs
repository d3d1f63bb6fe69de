//! Schemas of JSON, as the compiler of grammars takes them.

use serde_json::{Value, json};

use super::GrammarError;

/// Largest rules of an answer: the schemas of all tools.
pub(crate) const RULES_BYTES_MAX: usize = 1 << 20;
/// Largest schema as JSON.
const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// White space between the tokens of JSON: small models otherwise write nothing else.
const WHITE_SPACE: &str = r"\x20";

/// A schema with the white space that JSON may have as one of its keys.
pub(crate) fn with_white_space(schema: &Value) -> Result<Value, GrammarError> {
    if schema.to_string().len() > SCHEMA_BYTES_MAX {
        return Err(GrammarError(format!("the schema has more than {SCHEMA_BYTES_MAX} bytes")));
    }
    let mut schema = match schema {
        Value::Object(keys) => keys.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err(GrammarError::of("the schema must be an object, or true")),
    };
    schema.insert("x-guidance".into(), json!({ "whitespace_pattern": WHITE_SPACE }));
    Ok(Value::Object(schema))
}
