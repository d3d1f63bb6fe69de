//! Reads the resident file.

use std::{collections::BTreeMap, path::Path};

use larder_core::{TensorMeta, Tensors, TensorsError};
use twox_hash::XxHash3_128;

use super::{ALIGN, CHUNK_BYTES, parse_line};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        checksum::checksum_of,
        describe::stored_shape,
        read_at::ReadAt,
        safetensors::{PAD, SafetensorsHeader, TensorEntry, dtype_of},
    },
    manifest::ResidentFile,
    progress::Progress,
};

/// An open resident file.
pub struct ResidentTensors {
    file: ReadAt,
    tensors: BTreeMap<String, Tensor>,
    pads: Vec<(u64, usize)>,
}

struct Tensor {
    meta: TensorMeta,
    start: u64,
    checksum: String,
}

impl ResidentTensors {
    /// Opens the file and checks its header; also returns its length and header checksum.
    pub fn open(path: &Path) -> Result<(Self, ResidentFile)> {
        let file = ReadAt::open(path)?;
        let SafetensorsHeader { tensors, mut metadata, data_start } = SafetensorsHeader::read(&file)?;
        let header = file.read_vec(0, data_start)?;
        let written = ResidentFile { bytes: file.len(), header_checksum: checksum_of(&header) };
        let mut resident = ResidentTensors { file, tensors: BTreeMap::new(), pads: vec![] };
        for (name, entry) in tensors {
            if name.starts_with(PAD) && entry.bytes < ALIGN {
                resident.pads.push((entry.start, entry.bytes));
                continue;
            }
            let described = metadata.remove(&name).as_deref().and_then(parse_line);
            let (meta, checksum) = described
                .filter(|(meta, _)| agrees(meta, &entry))
                .ok_or_else(|| StoreError::malformed(path, format!("has no valid metadata for tensor '{name}'")))?;
            resident.tensors.insert(name, Tensor { meta, start: entry.start, checksum });
        }
        Ok((resident, written))
    }

    /// Reads large tensors past the page cache from now on.
    pub fn use_direct_io(&self) {
        self.file.use_direct_io();
    }

    /// All tensor names, sorted.
    pub fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    /// Checksum of a tensor according to the header.
    pub(crate) fn checksum(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|t| t.checksum.as_str())
    }

    /// Reads all tensors and compares them with the checksums of the header.
    pub(crate) fn check(&self, progress: &dyn Progress) -> Result<()> {
        let mut buffer = vec![0; CHUNK_BYTES];
        for (name, tensor) in &self.tensors {
            let mut checksum = XxHash3_128::new();
            for offset in (0..tensor.meta.bytes).step_by(CHUNK_BYTES) {
                let piece = &mut buffer[..CHUNK_BYTES.min(tensor.meta.bytes - offset)];
                self.file.read(tensor.start + offset as u64, piece)?;
                checksum.write(piece);
                progress.advance(piece.len() as u64);
            }
            self.compare(name, tensor, checksum.finish_128())?;
        }
        for (start, bytes) in &self.pads {
            if let Some(at) = self.file.read_vec(*start, *bytes as u64)?.iter().position(|b| *b != 0) {
                let what = format!("the padding is not zero at byte {}", start + at as u64);
                return Err(StoreError::new(StoreErrorKind::Mismatch, self.file.path(), what));
            }
        }
        Ok(())
    }

    fn compare(&self, name: &str, tensor: &Tensor, got: u128) -> Result<()> {
        let Tensor { meta, start, checksum } = tensor;
        if format!("{got:032x}") == *checksum {
            return Ok(());
        }
        let what = format!("tensor '{name}', {} bytes at {start}, does not match its checksum", meta.bytes);
        Err(StoreError::new(StoreErrorKind::Mismatch, self.file.path(), what))
    }
}

impl Tensors for ResidentTensors {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.tensors.get(name).map(|t| &t.meta)
    }

    /// A read of a whole tensor is checked against its checksum; a read of a part cannot be.
    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let missing = || StoreError::new(StoreErrorKind::Missing, self.file.path(), format!("has no tensor '{name}'"));
        let tensor = self.tensors.get(name).ok_or_else(missing)?;
        self.file.read(tensor.start + offset as u64, into)?;
        if into.len() == tensor.meta.bytes {
            self.compare(name, tensor, XxHash3_128::oneshot(into))?;
        }
        Ok(())
    }
}

fn agrees(meta: &TensorMeta, entry: &TensorEntry) -> bool {
    dtype_of(meta.kind) == entry.dtype && stored_shape(meta) == entry.shape && meta.bytes == entry.bytes
}
