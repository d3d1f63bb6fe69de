//! Files of trained weights, in the safetensors format.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use larder_policy::eviction::learned::{Array, Arrays, Evictor, Numbers};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::LabError;

/// Limit of the file's size.
const BYTES_MAX: u64 = 256 << 20;

/// Reads and checks trained weights.
pub fn read_evictor(path: &Path) -> Result<Evictor, LabError> {
    let unusable = |why: String| LabError::malformed(path, format!("has no usable weights for eviction: {why}"));
    Evictor::from_arrays(&read_arrays(path)?).map_err(|e| unusable(e.to_string()))
}

/// The metadata of a weights file.
pub fn evictor_metadata(path: &Path) -> Result<BTreeMap<String, String>, LabError> {
    Ok(read_arrays(path)?.meta.into_iter().collect())
}

/// Reads the tensors and metadata of a weights file.
pub(crate) fn read_arrays(path: &Path) -> Result<Arrays, LabError> {
    let wrong = |why: String| LabError::malformed(path, why);
    let about = fs::metadata(path).map_err(LabError::io(path, "reading"))?;
    if !about.is_file() || about.len() > BYTES_MAX {
        return Err(wrong("is not a weights file: too large, or not a regular file".to_owned()));
    }
    let bytes = fs::read(path).map_err(LabError::io(path, "reading"))?;
    let broken = |e| wrong(format!("is not a safetensors file ({e})"));
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(broken)?;
    let mut arrays = Arrays::default();
    arrays.meta.extend(header.metadata().clone().unwrap_or_default());
    for (name, tensor) in tensors.iter() {
        let data = tensor.data();
        let numbers = match tensor.dtype() {
            Dtype::F32 => Numbers::F32(data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::I8 => Numbers::I8(data.iter().map(|b| b.cast_signed()).collect()),
            other => return Err(wrong(format!("holds '{name}' as {other:?}, but weights for eviction are F32 or I8"))),
        };
        arrays.all.insert(name.to_owned(), Array { shape: tensor.shape().to_vec(), numbers });
    }
    Ok(arrays)
}

/// Writes trained weights, atomically.
pub fn write_evictor(path: &Path, arrays: &Arrays) -> Result<(), LabError> {
    let data = |numbers: &Numbers| match numbers {
        Numbers::F32(numbers) => (Dtype::F32, numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
        Numbers::I8(numbers) => (Dtype::I8, numbers.iter().map(|x| x.cast_unsigned()).collect()),
    };
    let all: Vec<_> = arrays.all.iter().map(|(name, array)| (name, &array.shape, data(&array.numbers))).collect();
    let view = |(name, shape, (dtype, bytes))| -> Result<_, safetensors::SafeTensorError> {
        let (name, shape): (&String, &Vec<usize>) = (name, shape);
        Ok((name, TensorView::new(dtype, shape.clone(), bytes)?))
    };
    let views = all.iter().map(|(name, shape, (dtype, bytes))| view((name, shape, (*dtype, bytes.as_slice()))));
    let wrong = |e| LabError::malformed(path, format!("cannot hold the weights ({e})"));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    let meta: HashMap<String, String> = arrays.meta.clone().into_iter().collect();
    let bytes = safetensors::serialize(views, Some(meta)).map_err(wrong)?;
    let mut temp = path.as_os_str().to_owned();
    temp.push(".tmp");
    let temp = PathBuf::from(temp);
    let written = File::create(&temp).and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()));
    written.and_then(|()| fs::rename(&temp, path)).map_err(LabError::io(path, "writing")).inspect_err(|_| {
        // A temporary file that remains is overwritten by the next attempt.
        let _ = fs::remove_file(&temp);
    })
}
