//! MLX: integers with a scale and a bias per group of columns, or floats of four bits (`mxfp4`). Integers of two and
//! four bits are kept as q4_1, exactly; those of eight have no equivalent and are rounded to f16.

use larder_core::NumberFormat;
use safetensors::Dtype;
use serde_json::Value;

use super::packed_integers::{Offsets, PackedIntegers, Packing};
use super::{Checkpoint, Found, PackedTensor, nibbles};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Bits of a word.
const WORD: usize = 32;

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    let mut found = Found::default();
    for scales in from.names() {
        let Some(module) = scales.strip_suffix(".scales") else { continue };
        let name = format!("{module}.weight");
        if from.find(&name).is_none_or(|stored| stored.dtype != Dtype::U32) {
            continue;
        }
        let tensor = tensor(from, module, Settings::of(config, module))?;
        found.tensors.insert(name, tensor);
    }
    Ok(found)
}

/// How a module is quantised: as the model, unless the config names the module.
struct Settings<'a> {
    bits: u64,
    group: u64,
    mode: &'a str,
}

impl<'a> Settings<'a> {
    fn of(config: &'a Value, module: &str) -> Self {
        let own = config[module].as_object().map(|_| &config[module]);
        let value = |key: &str| own.map(|own| &own[key]).filter(|v| !v.is_null()).unwrap_or(&config[key]);
        let number = |key| value(key).as_u64().unwrap_or_default();
        Settings { bits: number("bits"), group: number("group_size"), mode: value("mode").as_str().unwrap_or("affine") }
    }
}

fn tensor(from: &Checkpoint, module: &str, Settings { bits, group, mode }: Settings) -> Result<PackedTensor> {
    let [name, scales, biases] = ["weight", "scales", "biases"].map(|part| format!("{module}.{part}"));
    let refused = |kind, what: String| Err(StoreError::new(kind, from.path(), what));
    if !matches!((mode, bits), ("affine", 2 | 4 | 8) | ("mxfp4", 4)) {
        let what = format!(
            "has the tensor '{name}' of MLX in the mode '{mode}' with {bits} bits, which is not supported; affine with 2, \
             4 and 8 and mxfp4 are"
        );
        return refused(StoreErrorKind::Unsupported, what);
    }
    let (words, found_scales) = (from.stored(&name)?, from.stored(&scales)?);
    let mismatch =
        || format!("has the tensor '{name}' of shape {:?}, which its scales or biases do not fit", words.shape);
    let per_word = WORD / bits as usize;
    let Some((last, outer)) = words.shape.split_last() else { return refused(StoreErrorKind::Mismatch, mismatch()) };
    // A shape with a side of zero has no bytes in the file, whatever its other sides are.
    let rows = outer.iter().try_fold(1usize, |rows, side| rows.checked_mul(*side)).filter(|rows| *rows > 0);
    let Some((rows, cols)) = rows.zip(last.checked_mul(per_word)) else {
        return refused(StoreErrorKind::Mismatch, mismatch());
    };
    let shape = [outer, &[cols]].concat();
    if mode == "mxfp4" {
        return nibbles::tensor(from, &name, (&name, &scales), shape, true);
    }
    let found_biases = from.stored(&biases)?;
    let groups = found_scales.shape.last().copied().unwrap_or(0);
    let fits = found_scales.shape == [outer, &[groups]].concat()
        && groups > 0
        && cols.is_multiple_of(groups)
        && (cols / groups) as u64 == group;
    if !fits || (found_biases.dtype, &found_biases.shape) != (found_scales.dtype, &found_scales.shape) {
        return refused(StoreErrorKind::Mismatch, mismatch());
    }
    let tensor = PackedIntegers {
        codes: name.clone(),
        dtype: found_scales.dtype,
        scales,
        offsets: Offsets::Biases(biases),
        packing: Packing::Rows,
        shape: (rows, cols),
        group: group as usize,
        bits: bits as usize,
        kind: if bits == 8 { NumberFormat::F16 } else { NumberFormat::Q4_1 },
    };
    tensor.tensor(from, &name, shape)
}
