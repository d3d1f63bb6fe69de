//! `resident.safetensors`: the resident weights in one file, with tensors aligned to 64 bytes.
//!
//! The header holds number format, logical shape and checksum of each tensor, and the manifest holds the checksum of
//! the header, so each tensor is checked as it is read.

mod plan;
mod read;
mod view;
mod write;

pub(crate) use plan::choose_stored;
pub use plan::{PlannedTensor, ResidentPlan, check_resident};
pub use read::ResidentTensors;
pub use view::ConvertedTensors;
pub(crate) use write::{TensorEncoder, check_written, write};

use larder_core::TensorMeta;

use crate::files::describe;

/// Alignment of each tensor in bytes.
const ALIGN: usize = 64;
/// Alignment of the start of the data in bytes.
const DATA_ALIGN: usize = larder_core::SHARD_ALIGN;
/// Bytes that are read, converted and written at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// The metadata line of a tensor.
fn line(meta: &TensorMeta, checksum: &str) -> String {
    format!("{} {checksum}", describe::describe_with_order(meta))
}

/// Parses a line of [`line`].
fn parse_line(text: &str) -> Option<(TensorMeta, String)> {
    let (meta, checksum) = text.rsplit_once(' ')?;
    Some((describe::parse(meta)?, checksum.to_owned()))
}
