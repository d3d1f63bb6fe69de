//! Products of rows of the KV cache with vectors: the scores of attention and of indexers are made of them.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use super::KvTensor;
use super::kv_tensor::WIDENED_ROWS;
use crate::formats::widen;
use crate::inputs::bytes_of;
use crate::kernel_set::{KernelSet, StridedRows, Sums};
use crate::weights::Panel;

/// Up to this number of uses, rows in f16 and bf16 are widened in each.
const USES_OF_NARROW_ROWS: usize = 8;

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
                let StridedRows { kind, bytes, row_bytes } = stored.in_floats(set, tensor.width, x.len(), widened);
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

    /// The same rows in a float format, for `uses` of each: those in `q8_0`, and others that are used more often than
    /// is worth widening them each time, are widened into `widened`. There are at most [`WIDENED_ROWS`].
    pub fn in_floats<'b>(self, set: &KernelSet, width: usize, uses: usize, widened: &'b mut Vec<f32>) -> StridedRows<'b>
    where
        'a: 'b,
    {
        let is_float = self.kind.is_float();
        if self.kind == NumberFormat::F32 || is_float && uses <= USES_OF_NARROW_ROWS {
            return self;
        }
        widened.resize(widened.len().max(WIDENED_ROWS * width), 0.0);
        let rows = self.bytes.chunks(self.row_bytes);
        let widened = &mut widened[..rows.len() * width];
        for (row, out) in rows.zip(widened.chunks_exact_mut(width)) {
            if is_float {
                widen(self.kind, &row[..width * self.kind.block_bytes()], out);
            } else {
                (set.widen_q8_0)(row, out);
            }
        }
        StridedRows { kind: NumberFormat::F32, bytes: bytes_of(widened), row_bytes: width * size_of::<f32>() }
    }
}
