//! Models on disk: sources (checkpoints and GGUF files), conversion into a store, verification of a store, and readers
//! that fill slots with experts.
//!
//! To this crate a model is named tensors and expert bytes. It computes nothing beyond number formats, makes no network
//! requests, and decides nothing about caching.
//!
//! - [`Source`], [`open_source`]: a checkpoint folder ([`Checkpoint`]) or a GGUF file ([`Gguf`]), as tensors by name.
//! - [`convert`]: from a source to a store, resumable. [`Assembler`] reads single experts from a source.
//! - [`Importance`]: what the inputs of each matrix were, so that conversion rounds where it matters least.
//! - [`Store`], [`Manifest`]: an open store, and its `larder.json`.
//! - [`add_drive`], [`SecondFolder`]: the shards of a store on a second drive, as copies or divided.
//! - [`TowerSource`]: the image tower of a model, which [`add_vision`] adds to a store.
//! - [`RowTable`]: a matrix of a store whose rows are read one by one.
//! - [`verify`]: checks every byte of a store.
//! - [`ExpertSource`]: reads one expert at a time, from a store or a source.
//! - [`reader`]: reads many experts at a time into the slots of an [`Arena`](reader::Arena), by io_uring or pread.
//! - [`StoreError`]: what was wrong, and in which file.
//!
//! A slot moves into a request and comes back with its completion, so nothing else can reach its bytes meanwhile. This
//! uses the fake of the readers, with a shard in memory:
//!
//! ```
//! use std::{collections::VecDeque, sync::Arc};
//! use larder_store::reader::{Arena, MemoryReader, ReadRequest, Reader};
//!
//! let mut reader = MemoryReader::new(Arc::new(vec![vec![7; 4096]]), 1);
//! let (_arena, mut slots) = Arena::new(2, 4096)?;
//! let request = ReadRequest { shard: 0, offset: 0, len: 4096, slot: slots.remove(0), tag: 5 };
//! reader.submit(&mut VecDeque::from([request]));
//! let done = reader.wait().expect("one read is in flight");
//! done.result?;
//! assert_eq!((done.tag, done.slot[0]), (5, 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assemble;
mod check_reads;
mod convert;
mod drives;
mod edit;
mod error;
mod expert_source;
mod files;
mod format_mix;
mod importance;
mod manifest;
mod parallel;
mod progress;
mod quantize;
pub mod reader;
mod resident;
mod row_table;
mod shard;
mod source;
mod store;
#[cfg(test)]
mod testing;
mod verify;

pub use assemble::Assembler;
pub use check_reads::CheckReads;
pub use convert::{ConvertOptions, ConvertReport, convert};
pub use drives::presence::StorePresence;
pub use drives::second_folder::{DRIVE_FILE, DRIVES_FILE, Division, SecondFolder, check_second_folder};
pub use edit::add_drive::{AddedDrive, add_drive};
pub use edit::add_vision::add_vision;
pub use edit::config::set_config;
pub use error::{Result, StoreError, StoreErrorKind};
pub use expert_source::ExpertSource;
pub use files::checksum::checksum_of;
pub use files::read_at::{ReadAt, read_small};
pub use files::safetensors::{DATA_START, Dtype, SafetensorsHeader, TensorEntry};
pub use format_mix::{FormatMix, WantedFormats};
pub use importance::{Importance, ImportanceRecord};
pub use manifest::{
    CONVERSION_STATE, ExpertChecksums, ExpertClass, ExpertFiles, FORMAT_VERSION, MANIFEST_FILE, Manifest, Provenance,
    RECORD_ALIGN, RESIDENT_FILE, ResidentFile, SidecarFile, TableFile,
};
pub use progress::Progress;
pub use quantize::{ValueOutOfRange, decode_floats, encode, encode_weighted};
pub use resident::{ConvertedTensors, check_resident};
pub use row_table::RowTable;
pub use shard::set::ShardSet;
pub use shard::shard_path;
pub use source::identity::{identity, samples_of_file};
pub use source::tensor_slice::AssemblyBuffers;
pub use source::{
    Checkpoint, Gguf, IncomingFiles, MtpTensors, PROCESSORS, QUANTISATION, SIDECARS, Source, SourceFile, SourceOptions,
    TowerForm, TowerSource, is_bare_file_name, mmproj_beside, open_mmproj, open_source, open_source_with, plain,
    require_tensor,
};
pub use store::Store;
pub use store::added::ADDED_SIDECARS;
pub use store::sidecars::{seal_if_in_store, seal_sidecars};
pub use verify::{HOT_EXPERTS, VerifiedFolder, VerifyReport, WELCOME, verify};
