//! The tensors of a GGUF file that divide the frequencies of RoPE. On the hub, their values are in the config.

use std::path::Path;

use larder_core::NumberFormat;

use super::reader::GgufTensor;
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

/// Number of values of a tensor at most, far above half of any head.
const FACTORS_MAX: usize = 4096;

/// The names of the tensors, and the divisors of the frequencies in each, from the highest frequency to the lowest.
#[derive(Default)]
pub(super) struct RopeFactors(Vec<(String, Vec<f32>)>);

impl RopeFactors {
    /// Reads `tensors`, which lie in `files`; `path` is the model's, for messages.
    pub fn read(path: &Path, files: &[ReadAt], tensors: &[GgufTensor]) -> Result<Self> {
        let read = |tensor: &GgufTensor| Ok((tensor.name.clone(), read_floats(path, &files[tensor.file], tensor)?));
        tensors.iter().map(read).collect::<Result<_>>().map(RopeFactors)
    }

    /// The divisors in the tensor `name`, if the file has it.
    pub fn of(&self, name: &str) -> Option<&[f32]> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, factors)| factors.as_slice())
    }
}

fn read_floats(path: &Path, file: &ReadAt, tensor: &GgufTensor) -> Result<Vec<f32>> {
    let GgufTensor { name, meta, offset, .. } = tensor;
    let values: usize = meta.shape.iter().product();
    if meta.kind != NumberFormat::F32 || values > FACTORS_MAX {
        let what = format!(
            "has the tensor '{name}' with {values} values in {}; RoPE needs at most {FACTORS_MAX} in f32",
            meta.kind
        );
        return Err(StoreError::new(StoreErrorKind::Unsupported, path, what));
    }
    let bytes = file.read_vec(*offset, meta.bytes as u64)?;
    let factors: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    if factors.iter().all(|f| f.is_finite() && *f > 0.0) {
        Ok(factors)
    } else {
        Err(StoreError::malformed(path, format!("has values in the tensor '{name}' that are not positive")))
    }
}
