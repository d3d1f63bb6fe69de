//! Eight rows side by side, in either row order, for kernels that have one row per SIMD lane.

use larder_core::{BlockParts, NumberFormat, ROW_GROUP};

use crate::kernel_set::Sums;
use crate::weights::Panel;

/// The addresses at which eight rows begin. If they are interleaved (`INTERLEAVED`), only the first address is used; if
/// there are fewer, the last row stands in for missing ones.
pub struct EightRows<const INTERLEAVED: bool>([*const u8; ROW_GROUP]);

impl<const INTERLEAVED: bool> EightRows<INTERLEAVED> {
    #[inline]
    pub fn of(panel: &Panel) -> Self {
        match INTERLEAVED {
            true => EightRows([panel.bytes.as_ptr(); ROW_GROUP]),
            false => {
                EightRows(std::array::from_fn(|r| panel.bytes[r.min(panel.rows - 1) * panel.row_bytes..].as_ptr()))
            }
        }
    }

    /// The block at `index` of all rows.
    #[inline]
    pub fn block(&self, kind: NumberFormat, index: usize) -> EightBlocks<'_, INTERLEAVED> {
        let parts = kind.parts().expect("kernels for block formats get block formats");
        let at = index * kind.block_bytes() * if INTERLEAVED { ROW_GROUP } else { 1 };
        EightBlocks { rows: &self.0, at, parts }
    }
}

/// One block of each of eight rows.
#[derive(Clone, Copy)]
pub struct EightBlocks<'a, const INTERLEAVED: bool> {
    rows: &'a [*const u8; ROW_GROUP],
    at: usize,
    parts: BlockParts,
}

impl<const INTERLEAVED: bool> EightBlocks<'_, INTERLEAVED> {
    /// The address of scale `i` in the block of row `row`. If the rows are interleaved, the same scale of the next rows
    /// follows.
    #[inline]
    pub fn scale_at(self, i: usize, row: usize) -> *const u8 {
        match INTERLEAVED {
            true => self.rows[0].wrapping_add(self.at + self.parts.interleaved_scale(i, row)),
            false => self.rows[row].wrapping_add(self.at + self.parts.scales_at + self.parts.scale_bytes * i),
        }
    }

    /// The address of run `i` of four bytes in the block of row `row`. If the rows are interleaved, run `i` of the next
    /// rows follows, else run `i + 1` of the same row.
    #[inline]
    pub fn four_at(self, i: usize, row: usize) -> *const u8 {
        match INTERLEAVED {
            true => self.rows[0].wrapping_add(self.at + self.parts.interleaved_four(i, row)),
            false => self.rows[row].wrapping_add(self.at + self.parts.fours_at + 4 * i),
        }
    }
}

/// Checks, once per tile, the preconditions of the unsafe kernels. `x` yields the number of values of each token.
pub fn check(panels: &[Panel], mut x: impl ExactSizeIterator<Item = usize>, out: &[Sums]) {
    let first = &panels[0];
    for panel in panels {
        assert!(
            panel.rows > 0 && panel.bytes.len() == panel.rows * first.row_bytes,
            "a panel is not a whole number of rows"
        );
        assert!(panel.kind == first.kind && panel.blocks == first.blocks, "panels differ in number format or length");
    }
    assert!(first.row_bytes == first.blocks * first.kind.block_bytes(), "a row is not a whole number of blocks");
    assert!(panels.len() * x.len() == out.len() && x.all(|len| len == first.cols()), "activations do not fit the rows");
}
