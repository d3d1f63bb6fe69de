//! The model on disk: where it comes from, how it is converted into a store, and how a store is read and verified.
//!
//! No tensor type and no arithmetic beyond number formats lives here; a model is named tensors and expert bytes.

mod assemble;
mod atomic_file;
mod convert;
mod describe;
mod direct;
mod error;
mod expert_source;
mod file;
mod manifest;
mod parallel;
mod quantize;
pub mod reader;
mod resident;
mod safetensors;
mod shard;
mod source;
mod store;
mod tensor_slice;
#[cfg(test)]
mod testing;
mod verify;

pub use assemble::Assembler;
pub use convert::{CONVERSION_STATE, ConvertOptions, ConvertReport, Progress, convert};
pub use error::{Result, StoreError, StoreErrorKind};
pub use expert_source::ExpertSource;
pub use file::{ReadAt, read_small};
pub use manifest::{
    ExpertFiles, FORMAT_VERSION, MANIFEST_FILE, Manifest, Provenance, RESIDENT_FILE, ResidentFile, SidecarFile,
};
pub use quantize::{ValueOutOfRange, can_encode, decode_floats, encode};
pub use resident::check_resident;
pub use safetensors::{Dtype, SafetensorsHeader, TensorEntry};
pub use shard::{DATA_START, checksum_of, shard_path};
pub use source::{
    Checkpoint, Gguf, IncomingFiles, SIDECARS, Source, SourceFile, is_bare_file_name, open_source, require_tensor,
};
pub use store::Store;
pub use tensor_slice::AssemblyBuffers;
pub use verify::{VerifyReport, verify};
