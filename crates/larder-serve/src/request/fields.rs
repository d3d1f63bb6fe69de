//! Typed access to the fields of a JSON object, with errors that name the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// The fields of an object; a null counts as absent.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages, as in `messages[0].`.
    path: String,
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which errors call `path`; the body itself has an empty path.
    pub fn of(value: &'a Value, path: &str) -> Result<Self> {
        match value {
            Value::Object(map) if path.is_empty() => Ok(Fields { map, path: String::new() }),
            Value::Object(map) => Ok(Fields { map, path: format!("{path}.") }),
            other if path.is_empty() => Err(ApiError::bad_request(format!(
                "The request body must be a JSON object, but it is {}.",
                kind(other)
            ))),
            other => Err(wrong_type(path, "an object", other)),
        }
    }

    /// A field's name with its path.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// A field of any type.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn typed<T>(&self, field: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.name(field), wanted, value))
    }

    /// A required field of any type.
    pub fn required(&self, field: &str) -> Result<&'a Value> {
        let name = self.name(field);
        let message = || format!("Missing required parameter: '{name}'.");
        self.get(field).ok_or_else(|| ApiError::invalid_field(&name, "missing_required_parameter", message()))
    }

    /// An optional string.
    pub fn string(&self, field: &str) -> Result<Option<&'a str>> {
        self.typed(field, "a string", Value::as_str)
    }

    /// An optional boolean.
    pub fn boolean(&self, field: &str) -> Result<Option<bool>> {
        self.typed(field, "a boolean", Value::as_bool)
    }

    /// An optional array.
    pub fn array(&self, field: &str) -> Result<Option<&'a [Value]>> {
        self.typed(field, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    /// An optional object.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        self.get(field).map(|value| Fields::of(value, &self.name(field))).transpose()
    }

    /// An optional number within `range`.
    pub fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f32>> {
        let Some(number) = self.typed(field, "a number", Value::as_f64)? else { return Ok(None) };
        match range.contains(&number) {
            true => Ok(Some(number as f32)),
            false => Err(out_of(&self.name(field), number, range.start(), range.end())),
        }
    }

    /// An optional integer within `range`.
    pub fn integer(&self, field: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            Some(number) => Err(out_of(&self.name(field), number, range.start(), range.end())),
            None if value.as_i64().is_some() => Err(out_of(&self.name(field), value, range.start(), range.end())),
            None => Err(wrong_type(&self.name(field), "an integer", value)),
        }
    }
}

/// The error for a value of the wrong type.
pub fn wrong_type(name: &str, wanted: &str, got: &Value) -> ApiError {
    let message = format!("Invalid type for '{name}': expected {wanted}, but got {} instead.", kind(got));
    ApiError::invalid_field(name, "invalid_type", message)
}

fn out_of(
    name: &str,
    got: impl std::fmt::Display,
    low: impl std::fmt::Display,
    high: impl std::fmt::Display,
) -> ApiError {
    ApiError::invalid_field(
        name,
        "invalid_value",
        format!("Invalid value for '{name}': expected {low} to {high}, but got {got} instead."),
    )
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
