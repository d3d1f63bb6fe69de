//! Values of a config by name, within bounds: a file may be anybody's.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::VisionError;

/// The keys of a JSON object.
pub struct BoundedFields<'a> {
    /// The file, for errors.
    file: &'static str,
    keys: &'a Map<String, Value>,
}

impl<'a> BoundedFields<'a> {
    /// The keys of `value`.
    pub fn new(file: &'static str, value: &'a Value) -> Result<Self, VisionError> {
        let keys = value.as_object().ok_or(VisionError::Config { file, key: "", wanted: "an object".into() })?;
        Ok(BoundedFields { file, keys })
    }

    /// That a key must be something else.
    pub fn wrong(&self, key: &'static str, wanted: &str) -> VisionError {
        VisionError::Config { file: self.file, key, wanted: wanted.into() }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    /// A whole number within bounds.
    pub fn whole(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<Option<usize>, VisionError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match number.filter(|number| bounds.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                Err(self.out_of_bounds(key, &format!("a whole number from {} to {}", bounds.start(), bounds.end())))
            }
        }
    }

    /// A whole number within bounds that must be there.
    pub fn needed(&self, key: &str, bounds: RangeInclusive<usize>) -> Result<usize, VisionError> {
        let wanted = format!("a whole number from {} to {}", bounds.start(), bounds.end());
        self.whole(key, bounds)?.ok_or_else(|| self.out_of_bounds(key, &wanted))
    }

    fn out_of_bounds(&self, key: &str, wanted: &str) -> VisionError {
        VisionError::ConfigValue { file: self.file, key: key.to_string(), wanted: wanted.to_string() }
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, VisionError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.out_of_bounds(key, "a number"))
    }

    /// True or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, VisionError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.out_of_bounds(key, "true or false"))
    }

    /// A word.
    pub fn word(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// The list of a key; an empty one if it is absent.
    pub fn list(&self, key: &str, most: usize) -> Result<&'a [Value], VisionError> {
        let Some(value) = self.get(key) else { return Ok(&[]) };
        let list = value.as_array().filter(|list| list.len() <= most);
        list.map(Vec::as_slice).ok_or_else(|| self.out_of_bounds(key, &format!("a list of at most {most}")))
    }

    /// Three numbers, of which none is large.
    pub fn three(&self, key: &str) -> Result<Option<[f32; 3]>, VisionError> {
        if self.get(key).is_none() {
            return Ok(None);
        }
        let small = |value: &Value| value.as_f64().filter(|v| v.abs() <= 1e4).map(|v| v as f32);
        match self.list(key, 3)? {
            [r, g, b] => match (small(r), small(g), small(b)) {
                (Some(r), Some(g), Some(b)) => Ok(Some([r, g, b])),
                _ => Err(self.out_of_bounds(key, "three numbers")),
            },
            _ => Err(self.out_of_bounds(key, "three numbers")),
        }
    }

    /// An object.
    pub fn object(&self, key: &str) -> Result<Option<BoundedFields<'a>>, VisionError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let keys = value.as_object().ok_or_else(|| self.out_of_bounds(key, "an object"))?;
        Ok(Some(BoundedFields { file: self.file, keys }))
    }
}
