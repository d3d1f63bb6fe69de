//! How a tensor of a GGUF file becomes a tensor of the Hugging Face hub: its name, its shape and its values.

use larder_core::NumberFormat;

use super::{
    metadata::Metadata,
    reader::GgufTensor,
    stored::{HubTensor, Stored, ValueChange},
};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    source::integers,
};

/// A tensor's name in GGUF, its name on the hub, and how its data are mapped. Names in layers are relative to `blk.N.`
/// and `model.layers.N.`.
pub(super) type Rename = (&'static str, &'static str, Remap);

/// How a tensor of GGUF is mapped to that of the hub.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Remap {
    /// Unchanged.
    Same,
    /// A vector in GGUF is a matrix of one row on the hub.
    AsRow,
    /// The hub has a dimension of 1 in the middle: the channels of a convolution. GGUF has any dimensions of 1 before
    /// the last.
    AsChannels,
    /// The hub has a vector, and GGUF the same values in any form.
    AsVector,
    /// The rows of each query head are permuted.
    QueryRows,
    /// The rows of each key head are permuted.
    KeyRows,
    /// GGUF has 1 + w where the hub has w: norms whose weights are added to 1.
    OnePlus,
    /// GGUF has -e^w where the hub has w: the decay of a recurrent state.
    NegatedExp,
    /// The hub has integers of 64 bits.
    Integers,
    /// As `NegatedExp`; the hub has a value per head in a dimension between others of 1, and GGUF in any form.
    NegatedExpOfHeads,
    /// As `NegatedExp`; the hub has a vector, and GGUF any form.
    NegatedExpAsVector,
    /// GGUF has e^w, in any form, where the hub has a vector of w.
    Exp,
    /// The hub has the values in the config: divisors of RoPE's frequencies.
    RopeFactors,
}

impl Remap {
    pub fn hub_tensor(self, metadata: &Metadata, entry: &GgufTensor) -> Result<HubTensor> {
        let GgufTensor { meta, file, offset, .. } = entry;
        let mut tensor = HubTensor { meta: meta.clone(), file: *file, offset: *offset, stored: Stored::Same };
        match (self, meta.shape.as_slice()) {
            (Remap::AsRow, [n]) => tensor.meta.shape = vec![1, *n],
            (Remap::AsVector, all) => tensor.meta.shape = vec![all.iter().product()],
            (Remap::AsChannels, [channels @ .., width]) => {
                tensor.meta.shape = vec![channels.iter().product(), 1, *width];
            }
            (Remap::QueryRows, [rows, ..]) => {
                tensor.stored = Stored::HeadRows(head_rows(metadata, entry, *rows, "head_count")?)
            }
            (Remap::KeyRows, [rows, ..]) => {
                tensor.stored = Stored::HeadRows(head_rows(metadata, entry, *rows, "head_count_kv")?)
            }
            (Remap::Integers, shape) => {
                let too_large = || StoreError::malformed(metadata.path(), format!("has a too large '{}'", entry.name));
                (tensor.meta, tensor.stored) = (integers::meta(shape).ok_or_else(too_large)?, Stored::Integers);
            }
            (Remap::OnePlus, _) => tensor.stored = changed_values(metadata, entry, ValueChange::OnePlus)?,
            (Remap::NegatedExp, _) => tensor.stored = changed_values(metadata, entry, ValueChange::NegatedExp)?,
            (Remap::NegatedExpOfHeads, all) => {
                tensor.stored = changed_values(metadata, entry, ValueChange::NegatedExp)?;
                tensor.meta.shape = vec![1, 1, all.iter().product(), 1];
            }
            (Remap::NegatedExpAsVector, all) => {
                tensor.stored = changed_values(metadata, entry, ValueChange::NegatedExp)?;
                tensor.meta.shape = vec![all.iter().product()];
            }
            (Remap::Exp, all) => {
                tensor.stored = changed_values(metadata, entry, ValueChange::Exp)?;
                tensor.meta.shape = vec![all.iter().product()];
            }
            _ => {}
        }
        Ok(tensor)
    }
}

fn head_rows(metadata: &Metadata, entry: &GgufTensor, rows: usize, key: &str) -> Result<usize> {
    let key = metadata.under_architecture(&format!("attention.{key}"))?;
    // A list has the heads of each layer.
    let listed = metadata.ints(&key).ok().flatten().zip(split_layer(&entry.name));
    let count = match listed {
        Some((heads, (layer, _))) => heads.get(layer as usize).and_then(|heads| u64::try_from(*heads).ok()),
        None => metadata.uint(&key)?,
    };
    let count = match count {
        None => metadata.uint(&metadata.under_architecture("attention.head_count")?)?,
        some => some,
    };
    let heads = usize::try_from(metadata.need("attention.head_count", count)?).unwrap_or(0);
    let per_head = rows.checked_div(heads).filter(|per| per.is_multiple_of(2) && per * heads == rows);
    per_head.ok_or_else(|| {
        let what = format!(
            "has {rows} rows in the tensor '{}', which cannot be divided evenly among {heads} heads",
            entry.name
        );
        StoreError::new(StoreErrorKind::Mismatch, metadata.path(), what)
    })
}

fn changed_values(metadata: &Metadata, entry: &GgufTensor, change: ValueChange) -> Result<Stored> {
    match entry.meta.kind {
        NumberFormat::F32 => Ok(Stored::Values(change)),
        other => {
            let what = format!("has the tensor '{}' in {other}; it must be in f32", entry.name);
            Err(StoreError::new(StoreErrorKind::Unsupported, metadata.path(), what))
        }
    }
}

/// Splits `blk.7.attn_q.weight` into 7 and the rest.
pub(super) fn split_layer(name: &str) -> Option<(u64, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}
