//! AWQ: integers of four bits packed along the rows, with a scale and a zero point per row and group of columns. Kept
//! as q5_0, exactly.

use larder_core::NumberFormat;
use serde_json::Value;

use super::gptq::{matrix, mismatch};
use super::packed_integers::{Offsets, PackedIntegers, Packing};
use super::{Checkpoint, Found};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Rows per word.
const PER_WORD: usize = 8;
const BITS: usize = 4;

pub(super) fn find(from: &Checkpoint, config: &Value) -> Result<Found> {
    let version = config["version"].as_str().unwrap_or("gemm").to_lowercase();
    let bits = config["bits"].as_u64().unwrap_or(BITS as u64);
    if version != "gemm" || bits != BITS as u64 {
        let what = format!(
            "is quantised by AWQ in the version '{version}' with {bits} bits; the version 'gemm' with 4 is supported"
        );
        return Err(StoreError::new(StoreErrorKind::Unsupported, from.path(), what));
    }
    let mut found = Found::default();
    for codes in from.names() {
        let Some(module) = codes.strip_suffix(".qweight") else { continue };
        let (name, [zeros, scales]) =
            (format!("{module}.weight"), ["qzeros", "scales"].map(|p| format!("{module}.{p}")));
        let ([cols, words], [groups, zero_words]) =
            matrix(from, codes)?.zip(matrix(from, &zeros)?).ok_or_else(|| mismatch(from, codes))?;
        let rows = words.checked_mul(PER_WORD).filter(|rows| *rows > 0 && words == zero_words);
        let rows = rows.filter(|rows| from.stored(&scales).is_ok_and(|stored| stored.shape == [groups, *rows]));
        let rows = rows.filter(|_| groups > 0 && cols.is_multiple_of(groups)).ok_or_else(|| mismatch(from, codes))?;
        let tensor = PackedIntegers {
            codes: codes.to_owned(),
            offsets: Offsets::Zeros { name: zeros, less: 0 },
            packing: Packing::Interleaved,
            shape: (rows, cols),
            group: cols / groups,
            bits: BITS,
            dtype: from.stored(&scales)?.dtype,
            scales,
            kind: NumberFormat::Q5_0,
        };
        let tensor = tensor.tensor(from, &name, vec![rows, cols])?;
        found.tensors.insert(name, tensor);
    }
    Ok(found)
}
