//! Fields that say what happens when the context is full.

use super::Result;
use super::fields::Fields;
use crate::error::ApiError;
use larder_text::ContextFull;

/// The field of all APIs.
pub fn context_full(fields: &Fields) -> Result<Option<ContextFull>> {
    let wrong = |error| {
        let message = format!("Invalid value for 'context_full': {error}.");
        ApiError::invalid_field("context_full", "invalid_value", message)
    };
    fields.string("context_full")?.map(str::parse).transpose().map_err(wrong)
}

/// OpenAI's field of Responses, which precedes the other.
pub fn truncation(fields: &Fields) -> Result<Option<ContextFull>> {
    match fields.string("truncation")? {
        None => context_full(fields),
        Some("auto") => Ok(Some(ContextFull::DropTurns)),
        Some("disabled") => Ok(Some(ContextFull::Stop)),
        Some(other) => {
            let message = format!(
                "Invalid value for 'truncation': '{}' is not one of auto, disabled.",
                crate::error::excerpt(other)
            );
            Err(ApiError::invalid_field("truncation", "invalid_value", message))
        }
    }
}

/// The tokens at the beginning that shifts keep; -1 stands for the whole prompt, as in llama.cpp's server.
pub fn keep(fields: &Fields, field: &str) -> Result<Option<usize>> {
    if fields.is_minus_one(field) {
        return Ok(Some(usize::MAX));
    }
    Ok(fields.integer(field, 0..=u32::MAX.into())?.map(|tokens| tokens as usize))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read<T>(body: Value, read: impl Fn(&Fields) -> Result<T>) -> std::result::Result<T, Option<String>> {
        Fields::of(&body, "").and_then(|fields| read(&fields)).map_err(|error| error.param)
    }

    #[test]
    fn choices_are_read_or_refused_by_name() {
        assert_eq!(read(json!({}), context_full), Ok(None));
        assert_eq!(read(json!({"context_full": "drop-turns"}), context_full), Ok(Some(ContextFull::DropTurns)));
        assert_eq!(read(json!({"context_full": "x"}), context_full), Err(Some("context_full".into())));
        assert_eq!(
            read(json!({"truncation": "auto", "context_full": "stop"}), truncation),
            Ok(Some(ContextFull::DropTurns))
        );
        assert_eq!(read(json!({"truncation": "disabled"}), truncation), Ok(Some(ContextFull::Stop)));
        assert_eq!(read(json!({"context_full": "shift"}), truncation), Ok(Some(ContextFull::Shift)));
        assert_eq!(read(json!({"truncation": "some"}), truncation), Err(Some("truncation".into())));
        let keep = |value: Value| read(json!({"n_keep": value}), |fields| keep(fields, "n_keep"));
        assert_eq!((keep(json!(-1)), keep(json!(7)), keep(Value::Null)), (Ok(Some(usize::MAX)), Ok(Some(7)), Ok(None)));
        assert_eq!(keep(json!(-2)), Err(Some("n_keep".into())));
    }
}
