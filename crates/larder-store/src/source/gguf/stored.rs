//! A tensor of a GGUF file in the form of the hub, whose data are changed while they are read.

use larder_core::TensorMeta;

use crate::{
    error::Result,
    files::read_at::ReadAt,
    source::integers::{self, StoredInteger},
};

/// Bytes of a 32-bit float.
const FLOAT: usize = size_of::<f32>();

/// The change that a converter made to the data of a tensor when it wrote the file.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Stored {
    /// Nothing.
    Same,
    /// The rows of each head, this number of them, were permuted: the two halves of a head are interleaved.
    HeadRows(usize),
    /// Each value, a 32-bit float, was changed.
    Values(ValueChange),
    /// They are integers of 32 bits, which are presented as floats.
    Integers,
}

/// A change of values that reading takes back.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum ValueChange {
    /// The file holds 1 + w.
    OnePlus,
    /// The file holds -e^w.
    NegatedExp,
    /// The file holds e^w.
    Exp,
}

impl ValueChange {
    /// The value on the hub of a value in the file.
    fn undone(self, stored: f32) -> f32 {
        match self {
            ValueChange::OnePlus => stored - 1.0,
            ValueChange::NegatedExp => (-stored).ln(),
            ValueChange::Exp => stored.ln(),
        }
    }
}

/// A tensor in the form of the hub.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct HubTensor {
    pub meta: TensorMeta,
    /// Index of the file that holds it.
    pub file: usize,
    /// Offset of its first byte in that file.
    pub offset: u64,
    pub stored: Stored,
}

impl HubTensor {
    /// Reads the bytes from `offset` on, counted in the tensor as it is on the hub, from the file that holds it.
    pub fn read(&self, file: &ReadAt, offset: usize, into: &mut [u8]) -> Result<()> {
        match self.stored {
            Stored::Same => file.read(self.offset + offset as u64, into),
            Stored::HeadRows(head_rows) => self.read_rows(file, head_rows, offset, into),
            Stored::Values(change) => self.read_values(file, change, offset, into),
            Stored::Integers => {
                let read = |offset, into: &mut [u8]| file.read(self.offset + offset as u64, into);
                integers::read(StoredInteger::I32, offset, into, read)
            }
        }
    }

    fn read_rows(&self, file: &ReadAt, head_rows: usize, offset: usize, into: &mut [u8]) -> Result<()> {
        let rows = self.meta.shape.first().copied().unwrap_or(1);
        let row_bytes = self.meta.bytes / rows;
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let (row, within) = (at / row_bytes, at % row_bytes);
            let (piece, after) = rest.split_at_mut(rest.len().min(row_bytes - within));
            let stored = stored_row(row, head_rows) * row_bytes + within;
            file.read(self.offset + stored as u64, piece)?;
            at += piece.len();
            rest = after;
        }
        Ok(())
    }

    /// Reads the floats that overlap the range, whose ends need not be ends of floats.
    fn read_values(&self, file: &ReadAt, change: ValueChange, offset: usize, into: &mut [u8]) -> Result<()> {
        let (from, end) = (offset / FLOAT * FLOAT, (offset + into.len()).next_multiple_of(FLOAT));
        let mut bytes = file.read_vec(self.offset + from as u64, (end - from) as u64)?;
        for float in bytes.as_chunks_mut::<FLOAT>().0 {
            *float = change.undone(f32::from_le_bytes(*float)).to_le_bytes();
        }
        into.copy_from_slice(&bytes[offset - from..][..into.len()]);
        Ok(())
    }
}

/// The row of the file that holds row `row` of the hub, where GGUF interleaves the two halves of a head.
fn stored_row(row: usize, head_rows: usize) -> usize {
    let (head, within) = (row / head_rows, row % head_rows);
    let (half, pair) = (within / (head_rows / 2), within % (head_rows / 2));
    head * head_rows + 2 * pair + half
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_deinterleaved_into_halves() {
        let order: Vec<usize> = (0..8).map(|r| stored_row(r, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn changes_of_values_are_taken_back() {
        for w in [-0.7f32, 0.0, 0.1, 2.7] {
            assert!((ValueChange::OnePlus.undone(1.0 + w) - w).abs() < 2e-7, "{w}");
            assert!((ValueChange::NegatedExp.undone(-w.exp()) - w).abs() < 3e-7, "{w}");
            assert!((ValueChange::Exp.undone(w.exp()) - w).abs() < 3e-7, "{w}");
        }
    }
}
