//! Weight matrices as stored, and their rows as f32.

use larder_core::{NumberFormat, ROW_GROUP, RowOrder};

use crate::formats::widen;
use crate::inputs::bytes_of;

/// Size of the largest block format.
const MAX_BLOCK_BYTES: usize = {
    let (mut most, mut i) = (0, 0);
    while i < NumberFormat::ALL.len() {
        let bytes = NumberFormat::ALL[i].block_bytes();
        most = if bytes > most { bytes } else { most };
        i += 1;
    }
    most
};

/// A weight matrix `[rows, cols]` as stored.
#[derive(Clone, Copy)]
pub struct WeightMatrix<'a> {
    /// Number format.
    pub kind: NumberFormat,
    /// Whether the rows are interleaved.
    pub order: RowOrder,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub cols: usize,
    /// What all values are multiplied by: 1, where the format has no scale of whole matrices.
    pub scale: f32,
    /// Exactly `kind.matrix_bytes(rows, cols)` bytes, at any alignment.
    pub bytes: &'a [u8],
}

impl<'a> WeightMatrix<'a> {
    pub(crate) fn check(&self) {
        let WeightMatrix { kind, rows, cols, bytes, .. } = *self;
        assert_eq!(Some(bytes.len()), kind.matrix_bytes(rows, cols), "weight bytes do not fit the shape");
    }

    pub(crate) fn panels(&self) -> Panels<'a> {
        let blocks = self.cols / self.kind.block_len();
        let row_bytes = blocks * self.kind.block_bytes();
        let interleaved = self.order == RowOrder::Rows8 && !self.kind.is_float();
        Panels { kind: self.kind, interleaved, rows: self.rows, blocks, row_bytes, bytes: self.bytes }
    }
}

/// The rows of a matrix in groups of eight.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    kind: NumberFormat,
    interleaved: bool,
    rows: usize,
    blocks: usize,
    pub row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Panels<'a> {
    /// Number of panels.
    pub fn count(&self) -> usize {
        self.rows.div_ceil(ROW_GROUP)
    }

    /// Rows `8 · index` to `8 · index + 7`; fewer in the last panel.
    #[inline]
    pub fn get(&self, index: usize) -> Panel<'a> {
        let Panels { kind, interleaved, blocks, row_bytes, .. } = *self;
        let first = index * ROW_GROUP;
        let rows = ROW_GROUP.min(self.rows - first);
        let (bytes, rest) = self.bytes[first * row_bytes..].split_at(rows * row_bytes);
        let next = &rest[..rest.len().min(bytes.len())];
        Panel { kind, blocks, rows, row_bytes, interleaved: interleaved && rows == ROW_GROUP, bytes, next }
    }
}

/// Widens one row to f32.
///
/// # Panics
/// If the row is out of range, or a length does not fit the shape.
pub fn widen_row(weights: WeightMatrix, row: usize, out: &mut [f32]) {
    weights.check();
    widen_unscaled(weights, row, out);
    if weights.scale != 1.0 {
        out.iter_mut().for_each(|value| *value *= weights.scale);
    }
}

fn widen_unscaled(weights: WeightMatrix, row: usize, out: &mut [f32]) {
    assert!(row < weights.rows, "row {row} is out of range: the matrix has {} rows", weights.rows);
    let panel = weights.panels().get(row / ROW_GROUP);
    if !panel.interleaved {
        widen(weights.kind, panel.row(row % ROW_GROUP), out);
        return;
    }
    assert_eq!(out.len(), weights.cols, "output does not fit the shape");
    let values = weights.kind.block_len();
    for (i, out) in out.chunks_exact_mut(values).enumerate() {
        panel.with_block(row % ROW_GROUP, i, |block| widen(weights.kind, block, out));
    }
}

/// Up to eight consecutive rows: the unit of work of a kernel.
#[derive(Clone, Copy)]
pub struct Panel<'a> {
    pub kind: NumberFormat,
    /// Blocks of each row.
    pub blocks: usize,
    /// 1 to 8.
    pub rows: usize,
    pub row_bytes: usize,
    /// Whether the rows are interleaved as in [`RowOrder::Rows8`]; then there are eight.
    pub interleaved: bool,
    /// `rows · row_bytes` bytes.
    pub bytes: &'a [u8],
    /// The bytes that are likely to be read next, which a kernel may prefetch into the cache.
    pub next: &'a [u8],
}

impl<'a> Panel<'a> {
    /// One row in f32.
    pub fn of_floats(row: &'a [f32]) -> Self {
        let bytes = bytes_of(row);
        let (kind, row_bytes) = (NumberFormat::F32, bytes.len());
        Panel { kind, blocks: row.len(), rows: 1, row_bytes, interleaved: false, bytes, next: &[] }
    }

    /// Values of each row.
    pub fn cols(&self) -> usize {
        self.blocks * self.kind.block_len()
    }

    /// The bytes of a row of a panel that is not interleaved.
    pub fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }

    /// Calls `take` with one block of a row, in the layout of a plain row.
    #[inline]
    pub fn with_block<T>(&self, row: usize, index: usize, take: impl FnOnce(&[u8]) -> T) -> T {
        let len = self.kind.block_bytes();
        if !self.interleaved {
            return take(&self.row(row)[index * len..][..len]);
        }
        let parts = self.kind.parts().expect("only blocks are interleaved");
        let mut block = [0; MAX_BLOCK_BYTES];
        parts.pick(&self.bytes[index * len * ROW_GROUP..][..len * ROW_GROUP], row, &mut block[..len]);
        take(&block[..len])
    }
}

#[cfg(test)]
mod tests {
    use larder_core::interleave;

    use super::*;

    #[test]
    fn rows_are_equal_in_both_row_orders() {
        for kind in NumberFormat::ALL {
            let (rows, cols) = (19, 2 * kind.block_len());
            let plain: Vec<u8> = (0..kind.matrix_bytes(rows, cols).unwrap()).map(|i| (i * 151 % 61) as u8).collect();
            let mut interleaved = plain.clone();
            interleave(kind, rows, cols, &mut interleaved);
            for row in 0..rows {
                let (mut a, mut b) = (vec![0.0; cols], vec![1.0; cols]);
                widen_row(
                    WeightMatrix { kind, order: RowOrder::Plain, rows, cols, scale: 1.0, bytes: &plain },
                    row,
                    &mut a,
                );
                widen_row(
                    WeightMatrix { kind, order: RowOrder::Rows8, rows, cols, scale: 1.0, bytes: &interleaved },
                    row,
                    &mut b,
                );
                assert_eq!(a, b, "{kind}, row {row}");
            }
        }
    }
}
