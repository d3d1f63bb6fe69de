//! Typed access to the fields of a JSON object, with errors that name the field.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

type Result<T> = std::result::Result<T, ApiError>;

/// The fields of an object; a null counts as absent.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages, as in `messages[0].`.
    path: String,
    /// The fields that have been asked for.
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which errors call `path`; the body itself has an empty path.
    pub fn of(value: &'a Value, path: &str) -> Result<Self> {
        let fields = |map, path| Ok(Fields { map, path, asked: RefCell::default() });
        match value {
            Value::Object(map) if path.is_empty() => fields(map, String::new()),
            Value::Object(map) => fields(map, format!("{path}.")),
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

    /// The path of the object itself.
    pub fn path(&self) -> &str {
        self.path.trim_end_matches('.')
    }

    /// A field of any type.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(field.to_owned());
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// The fields that are there and that nothing has asked for.
    pub fn unread(&self) -> impl Iterator<Item = &'a String> {
        let asked = self.asked.borrow().clone();
        self.map.keys().filter(move |field| !asked.contains(*field))
    }

    fn typed<T>(&self, field: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.name(field), wanted, value))
    }

    /// A required field of any type.
    pub fn required(&self, field: &str) -> Result<&'a Value> {
        self.get(field).ok_or_else(|| self.missing(field))
    }

    /// The error for a required field that is not there.
    pub fn missing(&self, field: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("Missing required parameter: '{name}'.");
        ApiError::invalid_field(name, "missing_required_parameter", message)
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
        let Some(number) = self.typed(field, "an integer", whole)? else { return Ok(None) };
        match u64::try_from(number).ok().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(out_of(&self.name(field), number, range.start(), range.end())),
        }
    }

    /// Whether a field is -1, which stands for "without limit" in llama.cpp's and Ollama's servers.
    pub fn is_minus_one(&self, field: &str) -> bool {
        self.get(field).and_then(whole) == Some(-1)
    }
}

/// A whole number, which some clients write as a float.
pub fn whole(value: &Value) -> Option<i128> {
    /// Floats up to here are exact.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() <= EXACT);
    value.as_u64().map(i128::from).or(value.as_i64().map(i128::from)).or_else(|| float().map(|number| number as i128))
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
