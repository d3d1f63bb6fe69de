//! Launches of attention (scores, softmax, weighted sum) and of copies of KV rows.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use super::{Launches, THREADS, WARPS, pack, word};
use crate::driver::Argument;
use crate::error::Result;

/// Queries of a tile: kernels read keys and values once for up to this many queries that share a key head.
pub const TILE_QUERIES: usize = 4;

/// Threads of a block of one warp: a small number of warps is spread over all multiprocessors.
const WARP: u32 = 32;

/// The arguments of attention, as kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct AttentionKernelArgs {
    /// `[queries, heads, key_width]`
    pub queries: u64,
    /// Address of the first key of the first head.
    pub keys: u64,
    /// Address of the first value of the first head.
    pub values: u64,
    /// Bytes from the first key of a head to that of the next head.
    pub key_head_stride: u64,
    /// Bytes from the first value of a head to that of the next head.
    pub value_head_stride: u64,
    /// `[queries, 2]`: the first visible position, and the end of the range.
    pub seen: u64,
    /// `[heads]`, or 0.
    pub sinks: u64,
    /// `[tiles · TILE_QUERIES, score_stride]` for each launch.
    pub scores: u64,
    /// `[tiles · TILE_QUERIES]` for each launch: 1 / Σ e^(score − max).
    pub inverse_sums: u64,
    /// `[queries, heads, value_width]`
    pub out: u64,
    /// Number of queries.
    pub count: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Query heads per key head.
    pub group: u32,
    /// Bytes from one key to the next.
    pub key_row_stride: u32,
    /// Bytes from one value to the next.
    pub value_row_stride: u32,
    /// Components of a key that are used.
    pub key_width: u32,
    /// Components of a value that are used.
    pub value_width: u32,
    /// The most positions that a tile spans.
    pub score_stride: u32,
    /// Factor on the scores.
    pub scale: f32,
}

impl AttentionKernelArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 120;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; AttentionKernelArgs::BYTES] {
        let AttentionKernelArgs {
            queries,
            keys,
            values,
            key_head_stride,
            value_head_stride,
            seen,
            sinks,
            scores,
            inverse_sums,
            out,
            ..
        } = self;
        let AttentionKernelArgs {
            count,
            heads,
            group,
            key_row_stride,
            value_row_stride,
            key_width,
            value_width,
            score_stride,
            scale,
            ..
        } = self;
        let front = [queries, keys, values, key_head_stride, value_head_stride, seen, sinks, scores, inverse_sums, out];
        let scale = scale.to_bits();
        pack(
            front,
            [count, heads, group, key_row_stride, value_row_stride, key_width, value_width, score_stride, scale, 0],
        )
    }
}

/// A copy of KV rows; all strides are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy {
    /// Source address of the first row of the first head.
    pub from: u64,
    /// Source stride from head to head.
    pub from_head: usize,
    /// Source stride from row to row.
    pub from_row: usize,
    /// Target address of the first row of the first head. The target rows of a head have no gaps.
    pub to: u64,
    /// Target stride from head to head.
    pub to_head: usize,
    /// Bytes of a row.
    pub bytes: usize,
    /// Rows per head.
    pub count: usize,
    /// Number of heads.
    pub heads: usize,
}

impl Launches {
    /// Attention for some tiles; the arguments were written to address `list`.
    pub fn attend(
        &self,
        args: &AttentionKernelArgs,
        [keys, values]: [NumberFormat; 2],
        list: u64,
        tiles: Range<u32>,
    ) -> Result<()> {
        let arguments = [Argument::Address(list), Argument::Word(tiles.start)];
        let count = tiles.len() as u32;
        let (scores, weighted_sum) = (
            if keys == NumberFormat::F32 { "scores_f32" } else { "scores_f16" },
            if values == NumberFormat::F32 { "weighted_sum_f32" } else { "weighted_sum_f16" },
        );
        let blocks = args.score_stride.div_ceil(ROW_GROUP as u32 * WARPS);
        self.launch(scores, [blocks, count], 32 * WARPS, &arguments)?;
        self.launch("softmax", [TILE_QUERIES as u32, count], WARP, &arguments)?;
        self.launch(weighted_sum, [args.value_width.div_ceil(WARP), count], WARP, &arguments)
    }

    /// Copies rows in units of two bytes, the size of the smallest float format.
    pub fn copy_rows(&self, rows: &RowCopy) -> Result<()> {
        let halves = |bytes: usize| Argument::Bytes(bytes as u64 / 2);
        let blocks = word((rows.bytes / 2 * rows.count).div_ceil(THREADS as usize))?;
        let arguments = [
            Argument::Address(rows.from),
            Argument::Address(rows.to),
            halves(rows.from_head),
            halves(rows.from_row),
            halves(rows.to_head),
            Argument::Word(word(rows.bytes / 2)?),
            Argument::Word(word(rows.count)?),
        ];
        match blocks {
            0 => Ok(()),
            _ => self.launch("copy_rows", [blocks, word(rows.heads)?], THREADS, &arguments),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_written_as_kernels_read_them() {
        let args = AttentionKernelArgs {
            queries: 1,
            keys: 2,
            values: 3,
            key_head_stride: 4,
            value_head_stride: 5,
            seen: 6,
            sinks: 7,
            scores: 8,
            inverse_sums: 9,
            out: 10,
            count: 11,
            heads: 12,
            group: 13,
            key_row_stride: 14,
            value_row_stride: 15,
            key_width: 16,
            value_width: 17,
            score_stride: 18,
            scale: 1.0,
        };
        let words: Vec<u32> = args.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        let addresses: Vec<u32> = (1..11).flat_map(|at| [at, 0]).collect();
        assert_eq!(words[..20], addresses);
        assert_eq!(words[20..], [11, 12, 13, 14, 15, 16, 17, 18, 1.0f32.to_bits(), 0]);
    }
}
