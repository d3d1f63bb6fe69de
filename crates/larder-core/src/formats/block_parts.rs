//! The parts of a block of a number format, and their places where the rows of a group are interleaved.

/// Number of rows of a group, whose blocks are interleaved.
pub const ROW_GROUP: usize = 8;

/// The parts of a block: its scales, and the other bytes in runs of four.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockParts {
    /// Number of scales.
    pub scales: usize,
    /// Bytes of a scale: 2 (an f16, or bits that belong to several scales) or 1 (an exponent).
    pub scale_bytes: usize,
    /// Offset of the first scale in the block.
    pub scales_at: usize,
    /// Number of runs of four bytes.
    pub fours: usize,
    /// Offset of the first run in the block.
    pub fours_at: usize,
}

impl BlockParts {
    /// Offset of scale `i` of a row in the interleaved block of its group.
    #[inline]
    pub const fn interleaved_scale(self, i: usize, row: usize) -> usize {
        self.scale_bytes * (ROW_GROUP * i + row)
    }

    /// Offset of run `i` of a row in the interleaved block of its group.
    #[inline]
    pub const fn interleaved_four(self, i: usize, row: usize) -> usize {
        self.interleaved_scale(self.scales, 0) + 4 * (ROW_GROUP * i + row)
    }

    /// For a row of a group: each piece's offset in the row's own block, its offset in the interleaved block of the
    /// group, and its length, in bytes.
    pub(super) fn pieces(self, row: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let bytes = self.scale_bytes;
        let scales = (0..self.scales).map(move |i| (self.scales_at + bytes * i, self.interleaved_scale(i, row), bytes));
        let fours = (0..self.fours).map(move |i| (self.fours_at + 4 * i, self.interleaved_four(i, row), 4));
        scales.chain(fours)
    }

    /// Copies one row's block out of the interleaved block of its group.
    pub fn pick(self, mixed: &[u8], row: usize, block: &mut [u8]) {
        for (own, shared, len) in self.pieces(row) {
            block[own..own + len].copy_from_slice(&mixed[shared..shared + len]);
        }
    }
}
