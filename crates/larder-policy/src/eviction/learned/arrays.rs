//! Named arrays with metadata: trained weights as a file holds them, without the file.

use std::collections::BTreeMap;

use super::EvictorError;

/// Named arrays and their metadata: the content of a file of weights, without the file.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Arrays {
    /// The metadata: format, version, sizes and how the weights were trained.
    pub meta: BTreeMap<String, String>,
    /// The arrays by name.
    pub all: BTreeMap<String, Array>,
}

/// An array of any rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Array {
    /// The length of each dimension, the last one varying fastest.
    pub shape: Vec<usize>,
    /// The elements; their number is the product of the dimensions.
    pub numbers: Numbers,
}

/// The elements of an array, all in one number format.
#[derive(Clone, PartialEq, Debug)]
pub enum Numbers {
    /// Single precision.
    F32(Vec<f32>),
    /// 8-bit integers that belong to scales.
    I8(Vec<i8>),
}

impl Arrays {
    /// Adds an array in single precision.
    pub fn put(&mut self, name: &str, shape: &[usize], numbers: Vec<f32>) {
        self.all.insert(name.to_owned(), Array { shape: shape.to_vec(), numbers: Numbers::F32(numbers) });
    }

    /// Adds an array quantised to integers of -127 to 127 and, under `name.scale`, one scale for each run along the
    /// last dimension.
    pub fn put_quantised(&mut self, name: &str, shape: &[usize], numbers: &[f32]) {
        let run = shape.last().map_or(1, |n| (*n).max(1));
        let scale = |run: &[f32]| run.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
        let scales: Vec<f32> = numbers.chunks(run).map(scale).collect();
        let whole = |(run, scale): (&[f32], &f32)| -> Vec<i8> {
            let by = if *scale > 0.0 { scale.recip() } else { 0.0 };
            run.iter().map(|x| (x * by).round() as i8).collect()
        };
        let wholes = numbers.chunks(run).zip(&scales).flat_map(whole).collect();
        self.all.insert(name.to_owned(), Array { shape: shape.to_vec(), numbers: Numbers::I8(wholes) });
        self.put(&format!("{name}.scale"), &shape[..shape.len() - 1], scales);
    }

    /// The metadata under `key`.
    pub(super) fn text(&self, key: &'static str) -> Result<&str, EvictorError> {
        self.meta.get(key).map(String::as_str).ok_or(EvictorError::MissingKey { key })
    }

    /// The metadata under `key`, a whole number.
    pub(super) fn count(&self, key: &'static str) -> Result<usize, EvictorError> {
        let found = self.text(key)?;
        found.parse().map_err(|_| EvictorError::NotInteger { key, found: found.to_owned() })
    }

    /// The finite numbers of an array in single precision and of this shape.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Result<&[f32], EvictorError> {
        match &self.array(name, shape)?.numbers {
            Numbers::F32(numbers) if numbers.iter().all(|x| x.is_finite()) => Ok(numbers),
            Numbers::F32(_) => Err(EvictorError::NotFinite { name: name.to_owned() }),
            Numbers::I8(_) => Err(EvictorError::Kind { name: name.to_owned(), wanted: "single precision" }),
        }
    }

    /// The integers of a quantised array of this shape, and a scale for each run along the last dimension.
    pub(super) fn quantised(&self, name: &str, shape: &[usize]) -> Result<(&[i8], &[f32]), EvictorError> {
        match &self.array(name, shape)?.numbers {
            Numbers::I8(numbers) => Ok((numbers, self.floats(&format!("{name}.scale"), &shape[..shape.len() - 1])?)),
            Numbers::F32(_) => Err(EvictorError::Kind { name: name.to_owned(), wanted: "8-bit integers" }),
        }
    }

    fn array(&self, name: &str, shape: &[usize]) -> Result<&Array, EvictorError> {
        let array = self.all.get(name).ok_or_else(|| EvictorError::Missing { name: name.to_owned() })?;
        let length = match &array.numbers {
            Numbers::F32(numbers) => numbers.len(),
            Numbers::I8(numbers) => numbers.len(),
        };
        if array.shape != shape || shape.iter().product::<usize>() != length {
            let (wanted, has) = (shape.to_vec(), array.shape.clone());
            return Err(EvictorError::Shape { name: name.to_owned(), wanted, has });
        }
        Ok(array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_numbers_come_back_within_half_a_step() {
        let mut arrays = Arrays::default();
        let numbers = [0.5, -1.0, 0.25, 0.0, 0.0, 0.0];
        arrays.put_quantised("a", &[2, 3], &numbers);
        let (wholes, scales) = arrays.quantised("a", &[2, 3]).unwrap();
        for (i, x) in numbers.iter().enumerate() {
            let scale = scales[i / 3];
            assert!((f32::from(wholes[i]) * scale - x).abs() <= scale / 2.0, "{i}");
        }
        assert_eq!(scales[1], 0.0);
    }

    #[test]
    fn an_unsuitable_array_is_an_error() {
        let mut arrays = Arrays::default();
        arrays.put("a", &[2], vec![1.0, f32::NAN]);
        arrays.put("b", &[3], vec![1.0]);
        let said = |name, shape: &[usize]| arrays.floats(name, shape).unwrap_err().to_string();
        assert_eq!(said("a", &[2]), "the array 'a' holds numbers that are not finite");
        assert_eq!(said("a", &[3]), "the array 'a' has shape [2]; [3] is needed");
        assert_eq!(said("b", &[3]), "the array 'b' has shape [3]; [3] is needed");
        assert_eq!(said("c", &[3]), "the array 'c' is missing");
        let kind = arrays.quantised("a", &[2]).unwrap_err().to_string();
        assert_eq!(kind, "the array 'a' does not hold 8-bit integers");
    }
}
