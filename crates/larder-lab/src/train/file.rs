//! Files of trained weights, in the safetensors format.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use larder_engine::{EVICTOR_BYTES_MAX, evictor_arrays, evictor_from_bytes};
use larder_os::read_regular;
use larder_policy::eviction::learned::{Arrays, Evictor, Numbers};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::LabError;
use crate::export::write_atomically;

/// Reads and checks trained weights.
pub fn read_evictor(path: &Path) -> Result<Evictor, LabError> {
    evictor_from_bytes(&read(path)?).map_err(|e| LabError::malformed(path, e.0))
}

/// The metadata of a weights file.
pub fn evictor_metadata(path: &Path) -> Result<BTreeMap<String, String>, LabError> {
    let arrays = evictor_arrays(&read(path)?).map_err(|e| LabError::malformed(path, e.0))?;
    Ok(arrays.meta.into_iter().collect())
}

fn read(path: &Path) -> Result<Vec<u8>, LabError> {
    read_regular(path, EVICTOR_BYTES_MAX).map_err(LabError::io(path, "reading"))
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
    write_atomically(path, |out| out.write_all(&bytes))
}
