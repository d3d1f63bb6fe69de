//! `welcome.json`: what a page or a chat shows before the first message to a model.

use serde_json::{Map, Value, json};

use super::tokenizer_config::{ConfigError, json_object};

const FILE: &str = "welcome.json";
/// Longest text in bytes.
const TEXT_BYTES: usize = 200;
/// Most examples.
const EXAMPLES_MAX: usize = 6;

/// An invitation to the first message, as a model's author words it. It may be in a store that is not trusted, so its
/// texts are short and plain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// A line that says what to write.
    pub heading: String,
    /// Messages that suit the model.
    pub examples: Vec<String>,
}

impl Welcome {
    /// Reads a `welcome.json`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ConfigError> {
        let json = json_object(FILE, bytes)?;
        let wrong = |key: &str| {
            let what = format!("`{key}` must be plain text of at most {TEXT_BYTES} bytes");
            ConfigError::new(FILE, what)
        };
        let heading = plain_text(json.get("heading").unwrap_or(&Value::Null)).ok_or_else(|| wrong("heading"))?;
        let examples = examples(&json)?.iter().map(|text| plain_text(text).ok_or_else(|| wrong("examples")));
        Ok(Welcome { heading, examples: examples.collect::<Result<_, _>>()? })
    }

    /// As responses have it.
    pub fn json(&self) -> Value {
        json!({"heading": self.heading, "examples": self.examples})
    }
}

fn examples(json: &Map<String, Value>) -> Result<&[Value], ConfigError> {
    match json.get("examples") {
        None => Ok(&[]),
        Some(Value::Array(list)) if list.len() <= EXAMPLES_MAX => Ok(list),
        Some(_) => Err(ConfigError::new(FILE, format!("`examples` must be a list of at most {EXAMPLES_MAX} texts"))),
    }
}

/// The text of a value, if it is one line without control characters.
fn plain_text(value: &Value) -> Option<String> {
    let text = value.as_str().filter(|text| text.len() <= TEXT_BYTES && !text.contains(char::is_control))?;
    (!text.trim().is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read() {
        let welcome =
            Welcome::from_bytes(br#"{"heading": "Begin", "examples": ["Once", "It was"], "more": 1}"#).unwrap();
        assert_eq!((welcome.heading.as_str(), welcome.examples.len()), ("Begin", 2));
        assert_eq!(Welcome::from_bytes(welcome.json().to_string().as_bytes()).unwrap(), welcome);
        assert!(Welcome::from_bytes(br#"{"heading": "Begin"}"#).unwrap().examples.is_empty());
    }

    #[test]
    fn texts_that_are_long_or_not_plain_are_refused() {
        for (json, part) in [
            ("[]".to_owned(), "not a JSON object"),
            ("{}".to_owned(), "`heading`"),
            (r#"{"heading": "a\u001b[2J"}"#.to_owned(), "`heading`"),
            (r#"{"heading": " "}"#.to_owned(), "`heading`"),
            (format!(r#"{{"heading": "{}"}}"#, "a".repeat(TEXT_BYTES + 1)), "`heading`"),
            (r#"{"heading": "a", "examples": "b"}"#.to_owned(), "`examples`"),
            (r#"{"heading": "a", "examples": ["b\nc"]}"#.to_owned(), "`examples`"),
            (r#"{"heading": "a", "examples": ["1","2","3","4","5","6","7"]}"#.to_owned(), "at most 6"),
        ] {
            let error = Welcome::from_bytes(json.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("welcome.json: ") && error.contains(part), "{json}: {error}");
        }
    }
}
