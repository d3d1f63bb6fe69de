//! `resident.safetensors`: everything that every token needs, in one file whose tensors begin at multiples of 64 bytes.
//!
//! Its header carries kind, logical shape and checksum of each tensor, and the manifest carries the checksum of the
//! header, so the file is checked tensor by tensor as it is read.

mod plan;
mod read;
mod write;

pub use plan::{PlannedTensor, ResidentPlan, check_resident};
pub use read::ResidentTensors;
pub(crate) use write::{check_written, write};

use larder_core::TensorMeta;

use crate::describe;

/// Each tensor begins at a multiple of this many bytes.
const ALIGN: usize = 64;
/// The data begin at a multiple of this many bytes.
const DATA_ALIGN: usize = larder_core::SHARD_ALIGN;
/// Bytes that are read, converted and written at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// A tensor's line of metadata.
fn line(meta: &TensorMeta, checksum: &str) -> String {
    format!("{} {checksum}", describe::describe_with_order(meta))
}

/// What [`line`] wrote.
fn parse_line(text: &str) -> Option<(TensorMeta, String)> {
    let (meta, checksum) = text.rsplit_once(' ')?;
    Some((describe::parse(meta)?, checksum.to_owned()))
}
