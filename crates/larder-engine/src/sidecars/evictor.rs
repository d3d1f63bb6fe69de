//! `evictor.safetensors`: the trained weights of the eviction policy `learned`.

use larder_policy::eviction::learned::{Array, Arrays, Evictor, Numbers};
use safetensors::{Dtype, SafeTensors};

use super::SidecarError;

/// File name in the model's folder.
pub const EVICTOR_FILE: &str = "evictor.safetensors";
/// Limit of the file's size in bytes.
pub const EVICTOR_BYTES_MAX: u64 = 256 << 20;

/// Parses and checks trained weights.
pub fn evictor_from_bytes(bytes: &[u8]) -> Result<Evictor, SidecarError> {
    let unusable = |why| SidecarError(format!("has no usable weights for eviction: {why}"));
    Evictor::from_arrays(&evictor_arrays(bytes)?).map_err(unusable)
}

/// The arrays and metadata of trained weights, unchecked.
pub fn evictor_arrays(bytes: &[u8]) -> Result<Arrays, SidecarError> {
    let broken = |e| SidecarError(format!("is not a safetensors file ({e})"));
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(broken)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(broken)?;
    let mut arrays = Arrays::default();
    arrays.meta.extend(header.metadata().clone().unwrap_or_default());
    for (name, tensor) in tensors.iter() {
        let data = tensor.data();
        let numbers = match tensor.dtype() {
            Dtype::F32 => Numbers::F32(data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::I8 => Numbers::I8(data.iter().map(|b| b.cast_signed()).collect()),
            other => {
                let why = format!("holds '{name}' as {other:?}, but weights for eviction are F32 or I8");
                return Err(SidecarError(why));
            }
        };
        arrays.all.insert(name.to_owned(), Array { shape: tensor.shape().to_vec(), numbers });
    }
    Ok(arrays)
}
