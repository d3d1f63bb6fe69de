//! Writes the resident file.

use std::path::Path;

use larder_core::{ROW_GROUP, RowOrder, interleave};
use twox_hash::XxHash3_128;

use super::{CHUNK_BYTES, PlannedTensor, ResidentPlan, ResidentTensors};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{atomic_file::AtomicFile, checksum::checksum_of},
    manifest::ResidentFile,
    progress::Progress,
    source::{Source, tensor_slice::convert, view_for},
};

/// Writes the file at `path` atomically, a few megabytes at a time.
pub(crate) fn write(
    source: &dyn Source,
    plan: &ResidentPlan,
    path: &Path,
    progress: &dyn Progress,
) -> Result<ResidentFile> {
    let mut file = AtomicFile::create(path)?;
    let mut encoder = TensorEncoder::new(source);
    let header_bytes = plan.header_bytes();
    file.write(&vec![0; header_bytes])?;
    let mut end = 0;
    let mut checksums = Vec::with_capacity(plan.items.len());
    for item in &plan.items {
        file.write(&vec![0; item.offset - end])?;
        checksums.push(encoder.encode(item, &mut |bytes| {
            progress.advance(bytes.len() as u64);
            file.write(bytes)
        })?);
        end = item.offset + item.meta.bytes;
    }
    let header = plan.header(checksums.iter().map(String::as_str));
    file.write_at(&header, 0)?;
    file.publish()?;
    Ok(ResidentFile { bytes: (header_bytes + end) as u64, header_checksum: checksum_of(&header) })
}

/// Checks that the file at `path` is what [`write`] would write, as far as the file itself shows.
pub(crate) fn check_written(plan: &ResidentPlan, path: &Path) -> Result<ResidentFile> {
    let (resident, written) = ResidentTensors::open(path)?;
    let checksums = plan.items.iter().map(|item| resident.checksum(&item.name).unwrap_or_default());
    if checksum_of(&plan.header(checksums)) != written.header_checksum {
        return Err(StoreError::new(StoreErrorKind::Mismatch, path, "holds the tensors of another conversion"));
    }
    resident.check(&())?;
    Ok(written)
}

/// Reads tensors and converts them, a few megabytes at a time.
pub(crate) struct TensorEncoder<'a> {
    source: &'a dyn Source,
    raw: Vec<u8>,
    values: Vec<f32>,
    out: Vec<u8>,
}

impl<'a> TensorEncoder<'a> {
    /// An encoder of tensors of `source`.
    pub fn new(source: &'a dyn Source) -> Self {
        TensorEncoder { source, raw: vec![], values: vec![], out: vec![] }
    }

    /// Converts one tensor, hands its bytes to `sink` piece by piece, and returns their checksum.
    pub fn encode(
        &mut self,
        PlannedTensor { name, from, meta, importance, .. }: &PlannedTensor,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<String> {
        let source = view_for(self.source, name, Some(*from));
        let mut checksum = XxHash3_128::new();
        // Rows are whole blocks in both formats, so the tensor can be split between any two blocks.
        let block = from.block_len().max(meta.kind.block_len());
        // If rows are interleaved, it can be split only between groups of rows, and if columns matter, between rows.
        let cols = meta.shape.last().copied().unwrap_or(1);
        let block = if importance.is_some() { cols } else { block };
        let block = if meta.order == RowOrder::Plain { block } else { ROW_GROUP * cols };
        let values = meta.bytes / meta.kind.block_bytes() * meta.kind.block_len();
        let step = (CHUNK_BYTES / 4).next_multiple_of(block);
        for begin in (0..values).step_by(step) {
            let count = step.min(values - begin);
            let bytes_as =
                |kind: larder_core::NumberFormat, n: usize| kind.row_bytes(n).expect("steps must be whole blocks");
            self.raw.resize(bytes_as(*from, count), 0);
            source.read(name, bytes_as(*from, begin), &mut self.raw)?;
            self.out.resize(bytes_as(meta.kind, count), 0);
            let to = (meta.kind, importance.as_deref(), &mut self.out[..]);
            convert(source, name, (*from, &self.raw), to, &mut self.values)?;
            if meta.order != RowOrder::Plain {
                interleave(meta.kind, count / cols, cols, &mut self.out);
            }
            checksum.write(&self.out);
            sink(&self.out)?;
        }
        Ok(format!("{:032x}", checksum.finish_128()))
    }
}
