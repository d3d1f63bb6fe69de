//! The model on disk: where it comes from, how it is converted into a store, and how a store is read and verified.
//!
//! No tensor type and no arithmetic beyond number formats lives here; a model is named tensors and expert bytes.

mod assemble;
mod convert;
mod describe;
mod direct;
mod draft;
mod error;
mod experts;
mod file;
mod manifest;
mod parallel;
mod piece;
mod quantize;
pub mod reader;
mod resident;
mod safetensors;
mod shard;
mod source;
mod store;
#[cfg(test)]
mod testing;
mod verify;

pub use assemble::Assembler;
pub use convert::{CONVERTING, ConvertOptions, ConvertReport, Progress, convert};
pub use error::{Fault, Result, StoreError};
pub use experts::Experts;
pub use file::{ReadAt, read_small};
pub use manifest::{ExpertFiles, FORMAT, MANIFEST, Manifest, Provenance, RESIDENT, ResidentFile, SidecarFile};
pub use piece::Scratch;
pub use quantize::{Unfit, can_write, narrow, widen};
pub use resident::check_resident;
pub use safetensors::{Dtype, Entry, Header};
pub use shard::{DATA_START, checksum_of, shard_path};
pub use source::{Arrivals, Checkpoint, Gguf, SIDECARS, Source, SourceFile, is_plain_name, open_source, require};
pub use store::Store;
pub use verify::{VerifyReport, verify};
