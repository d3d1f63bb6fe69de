//! The same block of several rows, one row per lane, in either row order.

use larder_core::{BlockParts, NumberFormat, ROW_GROUP};

use super::Simd;
use crate::kernel_set::Sums;
use crate::weights::Panel;

/// The addresses at which the rows of a panel begin. If they are interleaved (`INTERLEAVED`), only the first address is
/// used; if there are fewer than eight, the last row stands in for missing ones.
pub struct EightRows<const INTERLEAVED: bool>([*const u8; ROW_GROUP]);

impl<const INTERLEAVED: bool> EightRows<INTERLEAVED> {
    #[inline(always)]
    pub fn of(panel: &Panel) -> Self {
        let mut rows = [panel.bytes.as_ptr(); ROW_GROUP];
        if !INTERLEAVED {
            for (r, row) in rows.iter_mut().enumerate() {
                *row = panel.bytes[r.min(panel.rows - 1) * panel.row_bytes..].as_ptr();
            }
        }
        EightRows(rows)
    }
}

/// One block of each row of a vector's lanes.
#[derive(Clone, Copy)]
pub struct Blocks<'a, S, const INTERLEAVED: bool> {
    /// The instruction set that loads them.
    pub simd: S,
    panels: &'a [EightRows<INTERLEAVED>; 2],
    /// The first row, counted over both panels.
    first: usize,
    /// Offset of the block in a row, or in the interleaved rows of a panel.
    at: usize,
    parts: BlockParts,
}

impl<'a, S: Simd, const INTERLEAVED: bool> Blocks<'a, S, INTERLEAVED> {
    /// The block at `index` of the rows from number `first` on.
    ///
    /// # Safety
    /// The panels have that block of these rows.
    #[inline(always)]
    #[allow(unsafe_code)]
    pub unsafe fn new(
        simd: S,
        panels: &'a [EightRows<INTERLEAVED>; 2],
        first: usize,
        kind: NumberFormat,
        index: usize,
    ) -> Self {
        let parts = kind.parts().expect("kernels for block formats get block formats");
        let at = index * kind.block_bytes() * if INTERLEAVED { ROW_GROUP } else { 1 };
        Blocks { simd, panels, first, at, parts }
    }

    /// Bytes of a scale: 1 or 2.
    #[inline(always)]
    pub fn scale_bytes(&self) -> usize {
        self.parts.scale_bytes
    }

    /// The address of scale `i` in the block of lane `lane`. If the rows are interleaved, the same scale of the next
    /// rows of the panel follows.
    #[inline(always)]
    pub fn scale_at(&self, i: usize, lane: usize) -> *const u8 {
        let (panel, row) = self.row(lane);
        if INTERLEAVED {
            panel.0[0].wrapping_add(self.at + self.parts.interleaved_scale(i, row))
        } else {
            panel.0[row].wrapping_add(self.at + self.parts.scales_at + self.parts.scale_bytes * i)
        }
    }

    /// The address of run `i` of four bytes in the block of lane `lane`. If the rows are interleaved, run `i` of the
    /// next rows of the panel follows, else run `i + 1` of the same row.
    #[inline(always)]
    pub fn run_at(&self, i: usize, lane: usize) -> *const u8 {
        let (panel, row) = self.row(lane);
        if INTERLEAVED {
            panel.0[0].wrapping_add(self.at + self.parts.interleaved_four(i, row))
        } else {
            panel.0[row].wrapping_add(self.at + self.parts.fours_at + 4 * i)
        }
    }

    #[inline(always)]
    fn row(&self, lane: usize) -> (&'a EightRows<INTERLEAVED>, usize) {
        let row = self.first + lane;
        (&self.panels[row / ROW_GROUP], row % ROW_GROUP)
    }

    /// Scale `i` of every block, an f16, as f32.
    #[inline(always)]
    pub fn half(self, i: usize) -> S::Floats {
        assert!(i < self.parts.scales && self.parts.scale_bytes == 2, "the blocks have fewer scales of two bytes");
        self.simd.half(self, i)
    }

    /// Scale `i` of every block, of one or two bytes, above which the lanes are zero.
    #[inline(always)]
    pub fn raw_scale(self, i: usize) -> S::Bytes {
        assert!(i < self.parts.scales, "the blocks have fewer scales");
        self.simd.raw_scale(self, i)
    }

    /// Run `i` of four bytes.
    #[inline(always)]
    pub fn run(self, i: usize) -> S::Bytes {
        assert!(i < self.parts.fours, "the blocks have fewer runs");
        self.simd.run_of_four(self, i)
    }

    /// Four runs of four bytes, from number `first` on.
    #[inline(always)]
    pub fn runs(self, first: usize) -> [S::Bytes; 4] {
        assert!(first + 4 <= self.parts.fours, "the blocks have fewer runs");
        self.simd.four_runs(self, first)
    }

    /// Eight runs of four bytes, from number `first` on.
    #[inline(always)]
    pub fn eight_runs(self, first: usize) -> [S::Bytes; 8] {
        joined(self.runs(first), self.runs(first + 4))
    }
}

/// Of 16 bytes of each row with a nibble for each of 32 values: the low nibbles, which are the first 16, then the high
/// ones.
#[inline(always)]
pub fn row_nibbles<S: Simd>(simd: S, runs: [S::Bytes; 4]) -> [S::Bytes; 8] {
    let [a, b, c, d] = runs;
    joined(
        [low(simd, a), low(simd, b), low(simd, c), low(simd, d)],
        [high(simd, a), high(simd, b), high(simd, c), high(simd, d)],
    )
}

/// The low nibble of every byte.
#[inline(always)]
pub fn low<S: Simd>(simd: S, bytes: S::Bytes) -> S::Bytes {
    simd.bits(bytes, 0, 0x0f0f_0f0f)
}

/// The high nibble of every byte.
#[inline(always)]
pub fn high<S: Simd>(simd: S, bytes: S::Bytes) -> S::Bytes {
    simd.bits(bytes, -4, 0x0f0f_0f0f)
}

/// Four runs, and the four that follow.
#[inline(always)]
pub fn joined<T>([a, b, c, d]: [T; 4], [e, f, g, h]: [T; 4]) -> [T; 8] {
    [a, b, c, d, e, f, g, h]
}

/// Checks, once per tile, the preconditions of the unsafe kernels. `x` yields the number of values of each token.
pub fn check(panels: &[Panel], mut x: impl ExactSizeIterator<Item = usize>, out: &[Sums]) {
    check_rows(panels);
    let cols = panels[0].cols();
    assert!(panels.len() * x.len() == out.len() && x.all(|len| len == cols), "activations do not fit the rows");
}

/// Checks that panels are whole rows of the same shape.
pub fn check_rows(panels: &[Panel]) {
    let first = &panels[0];
    for panel in panels {
        assert!(
            panel.rows > 0 && panel.bytes.len() == panel.rows * first.row_bytes,
            "a panel is not a whole number of rows"
        );
        assert!(panel.kind == first.kind && panel.blocks == first.blocks, "panels differ in number format or length");
        assert!(panel.rows == ROW_GROUP || !panel.interleaved, "only eight rows are interleaved");
    }
    assert!(first.row_bytes == first.blocks * first.kind.block_bytes(), "a row is not a whole number of blocks");
}
