//! GPTQ: integers packed along the columns of a transposed matrix, with a scale and a zero point per row and group of
//! columns. Kept as q4_0 or q8_0 where they are symmetric, else as q5_0, exactly. Columns in another order (act-order)
//! are refused.

use larder_core::{NumberFormat, Tensors};
use safetensors::Dtype;
use serde_json::Value;

use super::packed_integers::{Offsets, PackedIntegers, Packing};
use super::{Checkpoint, Found};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Bits of a word.
const WORD: usize = 32;

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    let mut found = Found::default();
    for codes in from.names() {
        let Some(module) = codes.strip_suffix(".qweight") else { continue };
        let name = format!("{module}.weight");
        let sizes = Sizes::of(from, module)?;
        check_order(from, module, &sizes)?;
        let Sizes { rows, cols, group, bits } = sizes;
        let scales = format!("{module}.scales");
        let tensor = PackedIntegers {
            codes: codes.to_owned(),
            offsets: Offsets::Zeros { name: format!("{module}.qzeros"), less: stored_less(config) },
            packing: Packing::Transposed,
            shape: (rows, cols),
            kind: kind(from, &name, bits, config["sym"].as_bool().unwrap_or(false))?,
            dtype: from.stored(&scales)?.dtype,
            scales,
            group,
            bits,
        };
        let tensor = tensor.tensor(from, &name, vec![rows, cols])?;
        found.tensors.insert(name, tensor);
    }
    Ok(found)
}

/// The sizes of a matrix, which follow from the shapes of its parts.
struct Sizes {
    rows: usize,
    cols: usize,
    /// Columns that share a scale.
    group: usize,
    bits: usize,
}

impl Sizes {
    fn of(from: &Checkpoint, module: &str) -> Result<Self> {
        let [codes, zeros, scales] = ["qweight", "qzeros", "scales"].map(|part| format!("{module}.{part}"));
        let shapes = matrix(from, &codes)?.zip(matrix(from, &zeros)?);
        let ([words, rows], [groups, zero_words]) = shapes.ok_or_else(|| mismatch(from, &codes))?;
        if rows == 0 || groups == 0 || from.stored(&scales)?.shape != [groups, rows] {
            return Err(mismatch(from, &codes));
        }
        // The words are in a file, so that their bits do not overflow.
        let bits = WORD * zero_words / rows;
        if !matches!(bits, 2 | 4 | 8) {
            let what = format!("has the tensor '{codes}' with {bits} bits per weight; 2, 4 and 8 are supported");
            return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
        }
        let cols = words * (WORD / bits);
        if cols.is_multiple_of(groups) && WORD * zero_words == bits * rows {
            Ok(Sizes { rows, cols, group: cols / groups, bits })
        } else {
            Err(mismatch(from, &codes))
        }
    }
}

/// By how much the stored zero points are less than the real ones: by one, but for the second version of the format.
fn stored_less(config: &Value) -> i32 {
    if config["checkpoint_format"] == "gptq_v2" { 0 } else { 1 }
}

/// The format that holds integers of `bits` bits less a zero point, which is the middle if they are symmetric.
fn kind(from: &Checkpoint, name: &str, bits: usize, symmetric: bool) -> Result<NumberFormat> {
    match (bits, symmetric) {
        (8, false) => {
            let what = format!("has the tensor '{name}' of 8 bits with zero points, which is not supported");
            Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what))
        }
        (8, true) => Ok(NumberFormat::Q8_0),
        (4, false) => Ok(NumberFormat::Q5_0),
        _ => Ok(NumberFormat::Q4_0),
    }
}

/// Rows and columns of a matrix of words; `None` if it is something else.
pub(super) fn matrix(from: &Checkpoint, name: &str) -> Result<Option<[usize; 2]>> {
    let stored = from.stored(name)?;
    let shape: Option<[usize; 2]> = stored.shape.as_slice().try_into().ok();
    Ok(shape.filter(|_| matches!(stored.dtype, Dtype::I32 | Dtype::U32)))
}

pub(super) fn mismatch(from: &Checkpoint, codes: &str) -> StoreError {
    let what = format!("has the quantised tensor '{codes}' whose words, zero points and scales do not fit each other");
    StoreError::new(StoreErrorKind::Mismatch, from.path(), what)
}

/// Refuses a matrix whose columns belong to groups in another order than they are in.
fn check_order(from: &Checkpoint, module: &str, sizes: &Sizes) -> Result<()> {
    let (cols, group) = (sizes.cols, sizes.group.max(1));
    let name = format!("{module}.g_idx");
    let Some(stored) = from.find(&name) else { return Ok(()) };
    let in_order = match (stored.dtype, &stored.shape[..]) {
        (Dtype::I32, [len]) if *len == cols => {
            let mut bytes = vec![0; 4 * cols];
            from.read(&name, 0, &mut bytes)?;
            let groups = bytes.as_chunks().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes)));
            groups.eq((0..cols).map(|col| (col / group) as i64))
        }
        _ => return Err(mismatch(from, &name)),
    };
    if in_order {
        return Ok(());
    }
    let what = format!(
        "has the tensor '{module}.weight' with its columns in another order (act-order, desc_act), which is not \
         supported; a version of the model without it, or an AWQ or GGUF file, can be used instead"
    );
    Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what))
}
