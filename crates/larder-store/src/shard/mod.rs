//! Shards: one expert per safetensors file. The header ends at byte 4096; the expert's bytes follow in the layout in
//! which they are computed with.
//!
//! A header depends only on layout and checksum, so it is checked by generating it again.

pub(crate) mod set;

use std::path::{Path, PathBuf};

use larder_core::{ExpertId, ExpertLayout, LayerIdx, SEGMENTS, SHARD_ALIGN, TensorMeta};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        checksum::checksum_of,
        describe::{describe, stored_shape},
        read_at::ReadAt,
        safetensors::{DATA_START, HeaderWriter, SafetensorsHeader, dtype_of},
    },
    manifest::ExpertChecksums,
};

/// Folder of the experts that a model computes with.
pub const EXPERTS: &str = "experts";
/// Folder of the second, smaller copies of the experts.
pub const SMALL_EXPERTS: &str = "experts-small";

/// Keys of the checksums of the segments.
const BY_SEGMENT: [&str; SEGMENTS] = ["xxh3_128.0", "xxh3_128.1"];

/// The expected properties of a shard.
#[derive(Clone, Copy)]
pub struct Shard<'a> {
    /// Layer of the expert.
    pub layer: LayerIdx,
    /// Index of the expert.
    pub expert: ExpertId,
    /// Layout of the data.
    pub layout: &'a ExpertLayout,
    /// Length of the file in bytes, the same for all shards of a class.
    pub file_bytes: usize,
}

impl Shard<'_> {
    /// The header of a shard whose data have `checksums`: [`DATA_START`] bytes.
    pub fn header(&self, checksums: &ExpertChecksums) -> Vec<u8> {
        let mut header = HeaderWriter::default();
        header.describe("layer", self.layer.0.to_string());
        header.describe("expert", self.expert.0.to_string());
        header.describe("layout", self.layout.order().name());
        BY_SEGMENT.iter().zip(&checksums.0).for_each(|(key, c)| header.describe(key, c));
        for (name, part) in self.layout.parts() {
            let shape = vec![part.rows, part.cols];
            header.describe(name, describe(part.kind, &shape));
            header.pad_to(part.offset);
            let meta = TensorMeta { kind: part.kind, order: part.order, shape, bytes: part.bytes };
            header.push(name, dtype_of(part.kind), &stored_shape(&meta), part.bytes);
        }
        header.pad_to(self.file_bytes - DATA_START);
        let bytes = header.finish(SHARD_ALIGN);
        assert_eq!(bytes.len(), DATA_START, "a header of nine parts must fit");
        bytes
    }

    /// Opens the shard at `path` and checks its length.
    pub fn open(&self, path: &Path) -> Result<ReadAt> {
        let file = ReadAt::open(path).map_err(|e| StoreError { message: format!("{self}: {}", e.message), ..e })?;
        if file.len() != self.file_bytes as u64 {
            let what = format!("{self} is {} bytes long, expected {}", file.len(), self.file_bytes);
            return Err(StoreError::malformed(path, what));
        }
        Ok(file)
    }

    /// Checks that the header of `file` is that of data with `checksums`.
    pub fn check_header(&self, file: &ReadAt, checksums: &ExpertChecksums) -> Result<()> {
        let got = file.read_vec(0, DATA_START as u64)?;
        let want = self.header(checksums);
        let Some(at) = got.iter().zip(&want).position(|(g, w)| g != w) else { return Ok(()) };
        let what = format!("the header of {self} is damaged: it differs at byte {at}");
        let damaged = StoreError::new(StoreErrorKind::Mismatch, file.path(), what);
        let Ok(header) = SafetensorsHeader::read(file) else { return Err(damaged) };
        let found = |key| header.metadata.get(key).map_or("?", String::as_str);
        if found("layer") != self.layer.0.to_string() || found("expert") != self.expert.0.to_string() {
            let what = format!("holds layer {}, expert {} instead of {self}", found("layer"), found("expert"));
            return Err(StoreError::new(StoreErrorKind::Mismatch, file.path(), what));
        }
        Err(damaged)
    }

    /// Checks the data, which are the bytes of the layout, against `checksums`.
    pub fn check_data(&self, path: &Path, data: &[u8], checksums: &ExpertChecksums) -> Result<()> {
        let mut ranges = self.layout.segments().into_iter().enumerate();
        ranges.try_for_each(|(i, range)| self.check_segment(path, i, &data[range], checksums))
    }

    /// Checks the bytes of one segment against `checksums`.
    pub fn check_segment(&self, path: &Path, segment: usize, bytes: &[u8], checksums: &ExpertChecksums) -> Result<()> {
        let (start, wanted) = (self.layout.segments()[segment].start, &checksums.0[segment]);
        let got = checksum_of(bytes);
        if got == *wanted {
            return Ok(());
        }
        let (len, at) = (bytes.len(), DATA_START + start);
        let what = format!("segment {segment} of {self}, {len} bytes at {at}, have checksum {got}, not {wanted}");
        Err(StoreError::new(StoreErrorKind::Mismatch, path, what))
    }

    /// Checks that the padding after the data is zero.
    pub fn check_tail(&self, path: &Path, tail: &[u8]) -> Result<()> {
        match tail.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(at) => {
                let at = DATA_START + self.layout.bytes + at;
                Err(StoreError::new(
                    StoreErrorKind::Mismatch,
                    path,
                    format!("the padding of {self} is not zero at byte {at}"),
                ))
            }
        }
    }

    /// Checks the whole shard against `checksums`. `data` receives all bytes after the header, and has their length.
    pub fn check_file(&self, path: &Path, checksums: &ExpertChecksums, data: &mut [u8]) -> Result<()> {
        let file = self.open(path)?;
        file.use_direct_io();
        self.check_header(&file, checksums)?;
        file.read(DATA_START as u64, data)?;
        let (expert, tail) = data.split_at(self.layout.bytes);
        self.check_data(path, expert, checksums)?;
        self.check_tail(path, tail)
    }

    /// Checks the whole shard against the checksums in its own header, which are returned. `data` receives all bytes
    /// after the header.
    pub fn check_by_itself(&self, path: &Path, data: &mut [u8]) -> Result<ExpertChecksums> {
        let file = self.open(path)?;
        let mut metadata = SafetensorsHeader::read(&file)?.metadata;
        let checksums = ExpertChecksums(BY_SEGMENT.map(|key| metadata.remove(key).unwrap_or_default()));
        self.check_header(&file, &checksums)?;
        file.read(DATA_START as u64, data)?;
        let (expert, tail) = data.split_at(self.layout.bytes);
        self.check_data(path, expert, &checksums)?;
        self.check_tail(path, tail)?;
        Ok(checksums)
    }
}

impl std::fmt::Display for Shard<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}, {}", self.layer, self.expert)
    }
}

/// The folder of a layer's shards in the set `set`, relative to the store.
pub fn layer_folder(set: &str, layer: LayerIdx) -> PathBuf {
    Path::new(set).join(format!("L{:03}", layer.0))
}

/// The path of a shard of the set `set`, relative to the store.
pub fn shard_path_in(set: &str, layer: LayerIdx, expert: ExpertId) -> PathBuf {
    layer_folder(set, layer).join(format!("E{:03}.safetensors", expert.0))
}

/// The path of the shard that the model computes with, relative to the store.
pub fn shard_path(layer: LayerIdx, expert: ExpertId) -> PathBuf {
    shard_path_in(EXPERTS, layer, expert)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_core::NumberFormat;

    fn written(dir: &Path) -> (PathBuf, ExpertLayout, usize) {
        let layout =
            ExpertLayout::new(96, 32, [NumberFormat::Q8_0, NumberFormat::F32, NumberFormat::Bf16], true).unwrap();
        let file_bytes = DATA_START + layout.bytes + SHARD_ALIGN;
        let shard = Shard { layer: LayerIdx(7), expert: ExpertId(42), layout: &layout, file_bytes };
        let mut data = vec![0; file_bytes - DATA_START];
        data[..layout.bytes].iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
        let mut bytes = shard.header(&ExpertChecksums::of_segments(&layout, &data[..layout.bytes]));
        bytes.extend(data);
        let path = dir.join("shard");
        std::fs::write(&path, bytes).unwrap();
        (path, layout, file_bytes)
    }

    #[test]
    fn a_shard_is_a_safetensors_file_with_aligned_parts() {
        let dir = tempfile::tempdir().unwrap();
        let (path, layout, _) = written(dir.path());
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("gate").unwrap().shape(), [32, 102]);
        assert_eq!(file.tensor("up").unwrap().dtype(), safetensors::Dtype::F32);
        assert_eq!(file.tensor("down_bias").unwrap().shape(), [1, 96]);
        assert_eq!(file.tensor("down").unwrap().data(), layout.down.of(&bytes[DATA_START..]));
    }

    #[test]
    fn a_changed_byte_anywhere_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (path, layout, file_bytes) = written(dir.path());
        let shard = Shard { layer: LayerIdx(7), expert: ExpertId(42), layout: &layout, file_bytes };
        let mut data = vec![0; file_bytes - DATA_START];
        shard.check_by_itself(&path, &mut data).unwrap();
        let good = std::fs::read(&path).unwrap();
        for at in (0..64).chain((64..file_bytes).step_by(97)).chain([DATA_START - 1, DATA_START, file_bytes - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, bad).unwrap();
            assert!(shard.check_by_itself(&path, &mut data).is_err(), "byte {at}");
        }
        std::fs::write(&path, &good[..file_bytes - 1]).unwrap();
        assert!(shard.check_by_itself(&path, &mut data).is_err());
    }

    #[test]
    fn a_shard_of_another_expert_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (path, layout, file_bytes) = written(dir.path());
        let shard = Shard { layer: LayerIdx(7), expert: ExpertId(43), layout: &layout, file_bytes };
        let error = shard.check_by_itself(&path, &mut vec![0; file_bytes - DATA_START]).unwrap_err();
        assert!(error.to_string().contains("holds layer 7, expert 42 instead of layer 7, expert 43"), "{error}");
    }
}
