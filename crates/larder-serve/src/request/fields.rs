//! Typed access to the fields of a JSON object, with errors that name the field.

use serde_json::{Map, Value};

use super::table::{Field, Kind, Object};
use crate::error::{ApiError, Result, excerpt};

/// The fields of an object, as its table has them; a null counts as absent.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Prefix of field names in messages, as in `messages[0].`.
    path: String,
    table: &'static Object,
}

impl<'a> Fields<'a> {
    /// The fields of `value`, which errors call `path`; the body itself has an empty path. All are checked by `table`.
    pub fn of(value: &'a Value, path: &str, table: &'static Object) -> Result<Self> {
        let Value::Object(map) = value else {
            return Err(match path {
                "" => {
                    let message = format!("The request body must be a JSON object, but it is {}.", kind(value));
                    ApiError::bad_request(message)
                }
                path => wrong_type(path, "an object", value),
            });
        };
        let path = if path.is_empty() { String::new() } else { format!("{path}.") };
        let fields = Fields { map, path, table };
        table.fields().try_for_each(|field| fields.check(field))?;
        Ok(fields)
    }

    fn check(&self, field: &Field) -> Result<()> {
        match (self.value(field.name), field.kind) {
            (None, _) if field.is_required => Err(self.missing(field.name)),
            (None, _) => Ok(()),
            (Some(value), Kind::Refused(neutral)) => neutral.check(&self.name(field.name), value, field.about),
            (Some(value), kind) => kind.check(&self.name(field.name), value),
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

    fn value(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// A field of any type. One that is not in the table is never there.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        let known = self.table.find(field);
        debug_assert!(known.is_some(), "the table of {} has no field {field}", self.table.name);
        #[cfg(test)]
        reads::add(self.table.name, field);
        self.value(known?.name)
    }

    /// A sentence for the log about each field that is not in the table.
    pub fn unknown(&self) -> impl Iterator<Item = String> {
        let unknown = self.map.keys().filter(|field| self.table.find(field).is_none());
        unknown.map(|field| format!("the field '{}' is not known and has no effect", excerpt(field)))
    }

    /// A field of any type that the request needs.
    pub fn required(&self, field: &str) -> Result<&'a Value> {
        self.get(field).ok_or_else(|| self.missing(field))
    }

    /// The error for a required field that is not there.
    pub fn missing(&self, field: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("Missing required parameter: '{name}'.");
        ApiError::invalid_field(name, "missing_required_parameter", message)
    }

    /// A string.
    pub fn string(&self, field: &str) -> Option<&'a str> {
        self.get(field)?.as_str()
    }

    /// A string that the request needs.
    pub fn required_string(&self, field: &str) -> Result<&'a str> {
        Ok(self.required(field)?.as_str().unwrap_or_default())
    }

    /// A boolean; if it is missing, the value that its table has for it.
    pub fn flag(&self, field: &str) -> bool {
        let missing = matches!(self.table.find(field), Some(Field { kind: Kind::Flag(true), .. }));
        self.boolean(field).unwrap_or(missing)
    }

    /// A boolean.
    pub fn boolean(&self, field: &str) -> Option<bool> {
        self.get(field)?.as_bool()
    }

    /// A number.
    pub fn number(&self, field: &str) -> Option<f32> {
        self.get(field)?.as_f64().map(|number| number as f32)
    }

    /// A whole number.
    pub fn integer(&self, field: &str) -> Option<i128> {
        whole(self.get(field)?)
    }

    /// A count, for which a number below zero stands for as many as possible.
    pub fn count(&self, field: &str) -> Option<usize> {
        self.integer(field).map(|count| usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// An array.
    pub fn array(&self, field: &str) -> &'a [Value] {
        self.get(field).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// The fields of an object.
    pub fn object(&self, field: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let table = self.table_of(field);
        table.map(|table| Fields::of(value, &self.name(field), table)).transpose()
    }

    /// The fields of each object of an array.
    pub fn objects(&self, field: &str) -> Result<Vec<Fields<'a>>> {
        let (values, name) = (self.array(field), self.name(field));
        let Some(table) = self.table_of(field) else { return Ok(vec![]) };
        values.iter().enumerate().map(|(i, value)| Fields::of(value, &format!("{name}[{i}]"), table)).collect()
    }

    /// The table of the objects in a field.
    fn table_of(&self, field: &str) -> Option<&'static Object> {
        self.table.find(field)?.kind.object()
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

/// The fields that parsers have asked for on this thread.
#[cfg(test)]
pub mod reads {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static READ: RefCell<BTreeSet<(&'static str, String)>> = RefCell::default();
    }

    /// Notes that a field of this object was asked for.
    pub fn add(object: &'static str, field: &str) {
        READ.with_borrow_mut(|read| read.insert((object, field.to_owned())));
    }

    /// All of them.
    pub fn all() -> BTreeSet<(&'static str, String)> {
        READ.take()
    }
}
