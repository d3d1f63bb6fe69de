//! The metadata of a GGUF file by key.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use crate::error::{Result, StoreError, StoreErrorKind};

/// A metadata value of a GGUF file. The widths of numbers do not matter and are not kept.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Value {
    Int(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Flags(Vec<bool>),
    Texts(Vec<String>),
}

impl Value {
    fn type_name(&self) -> &'static str {
        match self {
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Flag(_) => "a boolean",
            Value::Text(_) => "a string",
            Value::Ints(_) => "a list of integers",
            Value::Floats(_) => "a list of floats",
            Value::Flags(_) => "a list of booleans",
            Value::Texts(_) => "a list of strings",
        }
    }
}

/// The metadata of one GGUF file. Every getter returns `None` for a missing key, and an error that names the key if its
/// value has another type.
pub(crate) struct Metadata {
    path: PathBuf,
    values: HashMap<String, Value>,
}

impl Metadata {
    pub fn new(path: &Path) -> Self {
        Metadata { path: path.to_owned(), values: HashMap::new() }
    }

    /// Adds a value; a key must occur only once.
    pub fn insert(&mut self, key: String, value: Value) -> Result<()> {
        match self.values.insert(key.clone(), value) {
            None => Ok(()),
            Some(_) => Err(StoreError::malformed(&self.path, format!("has the metadata key '{key}' twice"))),
        }
    }

    /// The value of `general.architecture`.
    pub fn architecture(&self) -> Result<&str> {
        self.need("general.architecture", self.text("general.architecture")?)
    }

    /// `key` prefixed with the name of the architecture.
    pub fn under_architecture(&self, key: &str) -> Result<String> {
        Ok(format!("{}.{key}", self.architecture()?))
    }

    /// `value`, or an error that says `key` is missing.
    pub fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| StoreError::new(StoreErrorKind::Missing, &self.path, format!("has no metadata '{key}'")))
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "a string", |v| if let Value::Text(t) = v { Some(t.as_str()) } else { None })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "a boolean", |v| if let Value::Flag(f) = v { Some(*f) } else { None })
    }

    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "an integer of at least 0", |v| match v {
            Value::Int(i) => u64::try_from(*i).ok(),
            _ => None,
        })
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a finite number", |v| match v {
            Value::Float(f) if f.is_finite() => Some(*f),
            Value::Int(i) => Some(*i as f64),
            _ => None,
        })
    }

    pub fn ints(&self, key: &str) -> Result<Option<&[i64]>> {
        self.get(key, "a list of integers", |v| if let Value::Ints(l) = v { Some(l.as_slice()) } else { None })
    }

    pub fn floats(&self, key: &str) -> Result<Option<&[f32]>> {
        self.get(key, "a list of floats", |v| if let Value::Floats(l) = v { Some(l.as_slice()) } else { None })
    }

    pub fn flags(&self, key: &str) -> Result<Option<&[bool]>> {
        self.get(key, "a list of booleans", |v| if let Value::Flags(l) = v { Some(l.as_slice()) } else { None })
    }

    /// A list of booleans, which some files have as a list of numbers.
    pub fn flags_or_numbers(&self, key: &str) -> Result<Option<Vec<bool>>> {
        match self.values.get(key) {
            Some(Value::Ints(numbers)) => Ok(Some(numbers.iter().map(|n| *n != 0).collect())),
            _ => Ok(self.flags(key)?.map(<[bool]>::to_vec)),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        self.get(key, "a list of strings", |v| if let Value::Texts(l) = v { Some(l.as_slice()) } else { None })
    }

    /// The entries whose keys begin with `prefix`, in no order.
    pub fn entries(&self, prefix: &str) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().filter(move |(key, _)| key.starts_with(prefix)).map(|(key, value)| (key.as_str(), value))
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn get<'a, T>(&'a self, key: &str, wanted: &str, pick: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        pick(value).map(Some).ok_or_else(|| {
            StoreError::malformed(&self.path, format!("has {} as metadata '{key}', not {wanted}", value.type_name()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_another_type_is_named_with_its_key() {
        let mut meta = Metadata::new(Path::new("m.gguf"));
        meta.insert("a".into(), Value::Int(-1)).unwrap();
        meta.insert("b".into(), Value::Int(7)).unwrap();
        assert_eq!(meta.uint("b").unwrap(), Some(7));
        assert_eq!(meta.float("b").unwrap(), Some(7.0));
        assert_eq!(meta.uint("absent").unwrap(), None);
        assert_eq!(
            meta.uint("a").unwrap_err().to_string(),
            "m.gguf: has an integer as metadata 'a', not an integer of at least 0"
        );
        assert!(meta.insert("a".into(), Value::Flag(true)).unwrap_err().to_string().contains("'a' twice"));
    }

    #[test]
    fn a_missing_architecture_is_named() {
        let meta = Metadata::new(Path::new("m.gguf"));
        let error = meta.under_architecture("x").unwrap_err();
        assert_eq!(
            (error.kind, error.message.as_str()),
            (StoreErrorKind::Missing, "has no metadata 'general.architecture'")
        );
    }
}
