//! Attention, in three launches, and the copies of what it looks at.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};

use super::{Launches, THREADS, WARPS, pack, word};
use crate::driver::Argument;
use crate::error::Result;

/// Queries that kernels take together: the most that look at one head of keys.
pub const TILE_QUERIES: usize = 4;

/// Threads of a block that is a warp: few warps are spread over all processors.
const WARP: u32 = 32;

/// Who looks at what, as kernels read it.
#[derive(Clone, Copy, Debug)]
pub struct AttentionKernelArgs {
    /// `[queries, heads, key_width]`
    pub queries: u64,
    /// Where the first head's first key begins.
    pub keys: u64,
    /// Where the first head's first value begins.
    pub values: u64,
    /// Bytes from one head's first key to the next head's.
    pub key_head: u64,
    /// Bytes from one head's first value to the next head's.
    pub value_head: u64,
    /// `[queries, 2]`: the first position that is seen, and the one behind the last.
    pub seen: u64,
    /// `[heads]`, or 0.
    pub sinks: u64,
    /// `[few · TILE_QUERIES, stride]` for each launch.
    pub scores: u64,
    /// `[few · TILE_QUERIES]` for each launch.
    pub inverse_sums: u64,
    /// `[queries, heads, value_width]`
    pub out: u64,
    /// Queries.
    pub count: u32,
    /// Query heads.
    pub heads: u32,
    /// Query heads that look at one head of keys.
    pub group: u32,
    /// Bytes from one key to the next.
    pub key_row: u32,
    /// Bytes from one value to the next.
    pub value_row: u32,
    /// Numbers of a key that count.
    pub key_width: u32,
    /// Numbers of a value that count.
    pub value_width: u32,
    /// The most positions that any few see together.
    pub stride: u32,
    /// On the scores.
    pub scale: f32,
}

impl AttentionKernelArgs {
    /// Its length for kernels.
    pub const BYTES: usize = 120;

    /// For kernels.
    pub fn to_bytes(self) -> [u8; AttentionKernelArgs::BYTES] {
        let AttentionKernelArgs {
            queries,
            keys,
            values,
            key_head,
            value_head,
            seen,
            sinks,
            scores,
            inverse_sums,
            out,
            ..
        } = self;
        let AttentionKernelArgs {
            count, heads, group, key_row, value_row, key_width, value_width, stride, scale, ..
        } = self;
        let front = [queries, keys, values, key_head, value_head, seen, sinks, scores, inverse_sums, out];
        let scale = scale.to_bits();
        pack(front, [count, heads, group, key_row, value_row, key_width, value_width, stride, scale, 0])
    }
}

/// Rows that are copied; all strides are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct RowCopy {
    /// Where the first head's first row is.
    pub from: u64,
    /// From one head's first row to the next head's.
    pub from_head: usize,
    /// From one row to the next.
    pub from_row: usize,
    /// Where the first head's first row comes. One row follows the other there.
    pub to: u64,
    /// From one head's first row to the next head's.
    pub to_head: usize,
    /// Of one row.
    pub bytes: usize,
    /// Rows of each head.
    pub count: usize,
    /// Heads.
    pub heads: usize,
}

impl Launches {
    /// Some of the few of a look, which was written to `list`.
    pub fn attend(
        &self,
        look: &AttentionKernelArgs,
        [keys, values]: [NumberFormat; 2],
        list: u64,
        few: Range<u32>,
    ) -> Result<()> {
        let arguments = [Argument::Address(list), Argument::Word(few.start)];
        let count = few.len() as u32;
        let (scores, blend) = (
            if keys == NumberFormat::F32 { "scores_f32" } else { "scores_f16" },
            if values == NumberFormat::F32 { "weighted_sum_f32" } else { "weighted_sum_f16" },
        );
        let blocks = look.stride.div_ceil(ROW_GROUP as u32 * WARPS);
        self.launch(scores, [blocks, count], 32 * WARPS, &arguments)?;
        self.launch("softmax", [TILE_QUERIES as u32, count], WARP, &arguments)?;
        self.launch(blend, [look.value_width.div_ceil(WARP), count], WARP, &arguments)
    }

    /// Copies rows, in halves, which are the smallest numbers that there are.
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
    fn looks_are_written_as_kernels_read_them() {
        let look = AttentionKernelArgs {
            queries: 1,
            keys: 2,
            values: 3,
            key_head: 4,
            value_head: 5,
            seen: 6,
            sinks: 7,
            scores: 8,
            inverse_sums: 9,
            out: 10,
            count: 11,
            heads: 12,
            group: 13,
            key_row: 14,
            value_row: 15,
            key_width: 16,
            value_width: 17,
            stride: 18,
            scale: 1.0,
        };
        let words: Vec<u32> = look.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        let addresses: Vec<u32> = (1..11).flat_map(|at| [at, 0]).collect();
        assert_eq!(words[..20], addresses);
        assert_eq!(words[20..], [11, 12, 13, 14, 15, 16, 17, 18, 1.0f32.to_bits(), 0]);
    }
}
