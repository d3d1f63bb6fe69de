//! Fields that would change an answer and are not supported: refused by name unless they have a value that changes nothing. All
//! other fields that are not known have no effect.

use serde_json::Value;

use super::fields::Fields;
use crate::error::{ApiError, excerpt};

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

/// Of all APIs, with what clients of llama.cpp's and other servers send there. The page `docs/serve-fields.md` has a row for each.
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
    ("tfs_z", Numbers(&[1.0])),
    ("bad_words", Empty),
    ("stop_token_ids", Empty),
    ("truncate_prompt_tokens", Empty),
    ("guided_json", Empty),
    ("guided_regex", Empty),
    ("guided_choice", Empty),
    ("guided_grammar", Empty),
    ("structured_outputs", Empty),
];

/// Fields without effect on an answer, which clients send all the time.
const WITHOUT_EFFECT: &[&str] = &[
    "betas",
    "cache_control",
    "cache_prompt",
    "client_metadata",
    "id_slot",
    "include",
    "keep_alive",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "return_tokens",
    "safety_identifier",
    "service_tier",
    "skip_special_tokens",
    "store",
    "timings_per_token",
    "user",
    "verbosity",
];

/// A sentence for the log about each field that is not known.
pub fn unknown(fields: &Fields) -> impl Iterator<Item = String> {
    let unknown = fields.unread().filter(|field| !WITHOUT_EFFECT.contains(&field.as_str()));
    unknown.map(|field| format!("the field '{}' is not known and has no effect", excerpt(field)))
}

/// Refuses the first such field that is given.
pub fn refuse(fields: &Fields) -> Result<(), ApiError> {
    let given = UNSUPPORTED.iter().find(|(field, neutral)| fields.get(field).is_some_and(|value| !neutral.has(value)));
    match given {
        None => Ok(()),
        Some((field @ ("functions" | "function_call"), _)) => {
            Err(ApiError::unsupported(*field, format!("'{field}' is not supported; use 'tools'.")))
        }
        Some((field, _)) => {
            let name = fields.name(field);
            let message = format!("'{name}' is not supported.");
            Err(ApiError::unsupported(name, message))
        }
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
