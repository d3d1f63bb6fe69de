//! MXFP4 as gpt-oss is published: experts in `*_blocks` and `*_scales`, all else in bf16. They are kept as mxfp4,
//! exactly.

use larder_core::{ExpertNames, PerMatrix, RowPick, TensorSlice};
use safetensors::Dtype;
use serde_json::Value;

use super::{Checkpoint, Found, nibbles};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::Source,
};

/// Bytes of the codes of a block.
const BLOCK_BYTES: usize = 16;

pub(super) fn find(from: &Checkpoint, _: &Value) -> Result<Found> {
    let mut found = Found { experts: Some(names()), ..Found::default() };
    for packed in from.names() {
        let Some(name) = packed.strip_suffix("_blocks") else { continue };
        let stored = from.stored(packed)?;
        let shape = match stored.shape[..] {
            [experts, rows, blocks, BLOCK_BYTES] if stored.dtype == Dtype::U8 => {
                blocks.checked_mul(2 * BLOCK_BYTES).map(|cols| vec![experts, rows, cols])
            }
            _ => None,
        };
        let shape = shape.ok_or_else(|| {
            let what = format!(
                "tensor '{packed}' is {:?} of shape {:?}, not U8 of [experts, rows, blocks, {BLOCK_BYTES}]",
                stored.dtype, stored.shape
            );
            StoreError::new(StoreErrorKind::Mismatch, from.path(), what)
        })?;
        let tensor = nibbles::tensor(from, name, (packed, &format!("{name}_scales")), shape, true)?;
        found.tensors.insert(name.to_owned(), tensor);
    }
    Ok(found)
}

/// The experts of gpt-oss, which are not transposed in this form; gate and up in alternating rows.
fn names() -> ExpertNames {
    let piece = |name: &str, pick| TensorSlice::stacked(format!("model.layers.{{l}}.mlp.experts.{name}"), false, pick);
    let [matrices, bias] = [["gate_up_proj", "down_proj"], ["gate_up_proj_bias", "down_proj_bias"]].map(|[a, b]| {
        PerMatrix { gate: Some(piece(a, RowPick::Even)), up: piece(a, RowPick::Odd), down: piece(b, RowPick::All) }
    });
    ExpertNames { matrices, bias: Some(bias) }
}
