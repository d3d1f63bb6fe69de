//! The values by which a field that is not supported changes nothing.

use serde_json::{Value, json};

use crate::error::ApiError;

/// The values of a field that change nothing.
#[derive(Clone, Copy)]
pub enum Neutral {
    /// Numbers, booleans as 0 and 1.
    Numbers(&'static [f64]),
    /// An empty text, list or object.
    Empty,
    /// The list `["text"]`.
    Text,
}

use Neutral::{Empty, Numbers, Text};

impl Neutral {
    /// Refuses another value of the field `name`; `why` says why, or what to do instead.
    pub fn check(&self, name: &str, value: &Value, why: &str) -> Result<(), ApiError> {
        match (self.has(value), why) {
            (true, _) => Ok(()),
            (false, "") => Err(ApiError::unsupported(name, format!("'{name}' is not supported."))),
            (false, why) => Err(ApiError::unsupported(name, format!("'{name}' is not supported: {why}."))),
        }
    }

    /// The values that change nothing.
    pub fn values(&self) -> Vec<Value> {
        match self {
            Numbers(neutral) => {
                let booleans = [false, true].into_iter().filter(|boolean| self.has(&json!(boolean)));
                neutral.iter().map(|number| json!(number)).chain(booleans.map(Value::from)).collect()
            }
            Empty => vec![json!(""), json!([]), json!({})],
            Text => vec![json!(["text"]), json!([])],
        }
    }

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
