//! Products of rows of the KV cache with vectors: the scores of attention and of indexers are made of them.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use super::KvTensor;
use crate::inputs::bytes_of;
use crate::kernel_set::{KernelSet, StridedRows, Sums};
use crate::weights::Panel;

/// The rows of one head.
pub struct RowProducts<'a> {
    pub set: &'a KernelSet,
    pub rows: KvTensor<'a>,
    pub head: usize,
}

impl RowProducts<'_> {
    /// The products of the rows at `positions` with each of `x`, of which there are as many as `sums`: calls `take`
    /// with one group of rows after the other, counted from the first position, and their products. Rows in `q8_0` are
    /// widened into `widened`.
    pub fn multiply(
        &self,
        positions: Range<usize>,
        x: &[&[f32]],
        sums: &mut [Sums],
        widened: &mut Vec<f32>,
        mut take: impl FnMut(Range<usize>, &[Sums]),
    ) {
        let RowProducts { set, rows: tensor, head } = *self;
        let group = ROW_GROUP * tensor.row_bytes;
        let mut done = 0;
        let mut pages = tensor.by_page(positions).map(|page| tensor.rows(head, page)).peekable();
        while let Some(page) = pages.next() {
            let mut groups = page.chunks(group).peekable();
            while let Some(bytes) = groups.next() {
                let next = groups.peek().or(pages.peek()).map_or(&[][..], |next| &next[..next.len().min(bytes.len())]);
                let rows = bytes.len() / tensor.row_bytes;
                let stored = StridedRows { kind: tensor.kind, bytes, row_bytes: tensor.row_bytes };
                let StridedRows { kind, bytes, row_bytes } = stored.in_floats(set, tensor.width, widened);
                let panel = Panel { kind, blocks: tensor.width, rows, row_bytes, interleaved: false, bytes, next };
                (set.floats)(&[panel], x, sums);
                take(done..done + rows, sums);
                done += rows;
            }
        }
    }
}

impl<'a> StridedRows<'a> {
    /// The rows at these positions of a head, which are in one page.
    pub fn of(tensor: &KvTensor<'a>, head: usize, positions: Range<usize>) -> Self {
        StridedRows { kind: tensor.kind, bytes: tensor.rows(head, positions), row_bytes: tensor.row_bytes }
    }

    /// The same rows in a float format: those in `q8_0`, of which there are at most [`ROW_GROUP`], are widened into
    /// `widened`.
    pub fn in_floats<'b>(self, set: &KernelSet, width: usize, widened: &'b mut Vec<f32>) -> StridedRows<'b>
    where
        'a: 'b,
    {
        if self.kind.is_float() {
            return self;
        }
        widened.resize(widened.len().max(ROW_GROUP * width), 0.0);
        let rows = self.bytes.chunks(self.row_bytes);
        let widened = &mut widened[..rows.len() * width];
        rows.zip(widened.chunks_exact_mut(width)).for_each(|(row, out)| (set.widen_q8_0)(row, out));
        StridedRows { kind: NumberFormat::F32, bytes: bytes_of(widened), row_bytes: width * size_of::<f32>() }
    }
}
