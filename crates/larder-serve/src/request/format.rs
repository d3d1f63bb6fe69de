//! Structured output: which text a request asks for.

use larder_text::TextFormat;
use serde_json::Value;

use super::fields::{Fields, wrong_type};
use crate::error::{ApiError, excerpt};

type Result<T> = std::result::Result<T, ApiError>;

/// What the answer has to match, and the field that says so.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestedFormat {
    /// The field of the request, for errors.
    pub field: &'static str,
    /// What the answer has to match.
    pub format: TextFormat,
}

/// The format of the answer, by OpenAI's `response_format` or the fields `json_schema`, `grammar` and `regex`; `None` for any text.
pub fn requested_format(fields: &Fields) -> Result<Option<RequestedFormat>> {
    let schema = fields.get("json_schema").map(|schema| TextFormat::JsonSchema(schema.clone()));
    let all = [
        ("response_format", response_format(fields)?),
        ("json_schema", schema),
        ("grammar", grammar(fields)?),
        ("regex", fields.string("regex")?.map(|regex| TextFormat::Regex(regex.to_owned()))),
    ];
    let mut given = all.into_iter().filter_map(|(field, format)| Some(RequestedFormat { field, format: format? }));
    let first = given.next();
    if let (Some(first), Some(second)) = (&first, given.next()) {
        let message = format!("Give either '{}' or '{}', not both.", first.field, second.field);
        return Err(ApiError::invalid_field(second.field, "invalid_value", message));
    }
    if first.is_some() && fields.boolean("ignore_eos")? == Some(true) {
        let message =
            "The 'ignore_eos' parameter is not allowed with structured output, whose end is part of its format.";
        return Err(ApiError::invalid_field("ignore_eos", "invalid_value", message));
    }
    Ok(first)
}

fn response_format(fields: &Fields) -> Result<Option<TextFormat>> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    match format.string("type")? {
        None | Some("text") => Ok(None),
        // The second key is that of llama.cpp's server.
        Some("json_object") => Ok(Some(match format.get("schema") {
            Some(schema) => TextFormat::JsonSchema(schema.clone()),
            None => TextFormat::JsonObject,
        })),
        Some("json_schema") => {
            let value = format.required("json_schema")?;
            let inner = Fields::of(value, &format.name("json_schema"))?;
            Ok(Some(TextFormat::JsonSchema(inner.required("schema")?.clone())))
        }
        Some(other) => {
            let message = format!(
                "Invalid value for 'response_format.type': '{}' is not one of text, json_object, json_schema.",
                excerpt(other)
            );
            Err(ApiError::unsupported("response_format.type", message))
        }
    }
}

fn grammar(fields: &Fields) -> Result<Option<TextFormat>> {
    match fields.get("grammar") {
        None => Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(TextFormat::of_grammar(text))),
        Some(other) => Err(wrong_type("grammar", "a string", other)),
    }
}
