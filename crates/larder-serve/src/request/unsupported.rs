//! Fields that would change an answer and are not supported: refused by name unless they have a value that changes nothing.

use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// The values of a field that change nothing.
enum Neutral {
    /// Numbers, booleans as 0 and 1.
    Numbers(&'static [f64]),
    /// An empty text, list or object.
    Empty,
    /// The list `["text"]`.
    Text,
}

use Neutral::{Empty, Numbers, Text};

/// Of OpenAI's chats and completions, with what clients of llama.cpp's and other servers send there. The page
/// `docs/serve-fields.md` has a row for each.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("functions", Empty),
    ("function_call", Empty),
    ("audio", Empty),
    ("modalities", Text),
    ("web_search_options", Empty),
    ("prediction", Empty),
    ("typical_p", Numbers(&[1.0])),
    ("mirostat", Numbers(&[0.0])),
    ("dynatemp_range", Numbers(&[0.0])),
    ("top_n_sigma", Numbers(&[0.0, -1.0])),
    ("xtc_probability", Numbers(&[0.0])),
    ("dry_multiplier", Numbers(&[0.0])),
    ("min_tokens", Numbers(&[0.0])),
    ("length_penalty", Numbers(&[1.0])),
    ("use_beam_search", Numbers(&[0.0])),
    ("lora", Empty),
    ("samplers", Empty),
];

/// Refuses the first such field that is given.
pub fn refuse(fields: &Fields) -> Result<(), ApiError> {
    let given = UNSUPPORTED.iter().find(|(field, neutral)| fields.get(field).is_some_and(|value| !neutral.has(value)));
    match given {
        None => Ok(()),
        Some((field @ ("functions" | "function_call"), _)) => {
            Err(ApiError::unsupported(*field, format!("'{field}' is not supported; use 'tools'.")))
        }
        Some((field, _)) => Err(ApiError::unsupported(*field, format!("'{field}' is not supported."))),
    }
}

impl Neutral {
    fn has(&self, value: &Value) -> bool {
        match (self, value) {
            (Numbers(neutral), Value::Bool(value)) => neutral.contains(&f64::from(u8::from(*value))),
            (Numbers(neutral), value) => value.as_f64().is_some_and(|value| neutral.contains(&value)),
            (Text, Value::Array(list)) => list.iter().all(|kind| kind == "text"),
            (Empty, Value::Array(list)) => list.is_empty(),
            (Empty | Text, Value::Object(map)) => map.is_empty(),
            (Empty | Text, Value::String(text)) => text.is_empty(),
            (Empty | Text, _) => false,
        }
    }
}
