//! Launches of attention (scores, then softmax and weighted sum) and of copies of KV rows.

use std::ops::Range;

use larder_core::{NumberFormat, ROW_GROUP};
#[cfg(test)]
use larder_kernels::TILE_POSITIONS;
use larder_model::{TILE_QUERIES, position_tiles};

use super::{Launches, THREADS, WARPS, pack, word};
use crate::driver::Argument;
use crate::error::Result;
use crate::expert_kernels::BLOCK;

/// Threads of a warp.
const WARP: u32 = 32;
/// The number of blocks that compute scores is a multiple of this.
const SCORE_BLOCKS: u32 = 8;
/// Pairs of query and head of a warp of attention in half precision. The kernels have the same number.
const FLASH_PAIRS: u32 = 16;
/// Columns of values of such a warp. The kernels have the same number.
const FLASH_COLUMNS: u32 = 128;
/// The most threads of a block that computes weighted sums, as its kernel is compiled for: more would leave too few
/// registers.
const MAX_SUM_THREADS: u32 = 256;

/// The arguments of attention, as kernels read them.
#[derive(Clone, Copy, Default, Debug)]
pub struct AttentionKernelArgs {
    /// `[queries, heads, key_width]`
    pub queries: u64,
    /// Address of the table of the addresses of the pages of keys.
    pub key_pages: u64,
    /// Address of the table of the addresses of the pages of values.
    pub value_pages: u64,
    /// `[queries, 2]`: the first visible position, and the end of the range.
    pub seen: u64,
    /// `[heads]`, or 0.
    pub sinks: u64,
    /// `[tiles · TILE_QUERIES, score_stride]` for each launch.
    pub scores: u64,
    /// `[tiles · TILE_QUERIES]` for each launch: 1 / Σ e^(score − max).
    pub inverse_sums: u64,
    /// `[tiles · TILE_QUERIES, tile_stride, 2]` for each launch: the factors with which position tiles are added up.
    pub factors: u64,
    /// `[tiles · TILE_QUERIES, tile_stride, value_width]` for each launch, or 0: values are added up in one launch.
    pub partial_sums: u64,
    /// `[queries, heads, value_width]`
    pub out: u64,
    /// The same, quantised, or 0.
    pub blocks: u64,
    /// The position of each of the first `listed` rows that the task sees, which then has one query; or 0: they are at
    /// the positions of their numbers.
    pub chosen: u64,
    /// `[heads, 2 · reach + 1]`: additions to scores by the distance from query to key, or 0.
    pub bias: u64,
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
    /// The binary logarithm of the positions per page.
    pub page_shift: u32,
    /// Number of the task's first tile within its launch.
    pub first_tile: u32,
    /// The key head of the first query head.
    pub first_kv_head: u32,
    /// Rows that are listed, or are those of another source: the first ones.
    pub listed: u32,
    /// What the positions of the other rows are behind their numbers.
    pub behind: u32,
    /// The distance beyond which the bias does not change.
    pub reach: u32,
    /// With a bias: position of the first query, which the others follow.
    pub first_query: u32,
}

impl AttentionKernelArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 168;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; AttentionKernelArgs::BYTES] {
        let AttentionKernelArgs { queries, key_pages, value_pages: values, seen, sinks, scores, out, blocks, .. } =
            self;
        let AttentionKernelArgs { inverse_sums: inverse, factors, partial_sums: partial, chosen, bias, .. } = self;
        let front =
            [queries, key_pages, values, seen, sinks, scores, inverse, factors, partial, out, blocks, chosen, bias];
        let AttentionKernelArgs { count, heads, group, key_row_stride: key, value_row_stride: value, .. } = self;
        let AttentionKernelArgs { key_width, value_width, score_stride: stride, page_shift: shift, .. } = self;
        let AttentionKernelArgs { first_tile, first_kv_head, listed, behind, reach, first_query, .. } = self;
        let shape = [count, heads, group, key, value, key_width, value_width, stride, self.scale.to_bits(), shift];
        let mut words = [first_tile; 16];
        words[..10].copy_from_slice(&shape);
        words[11..].copy_from_slice(&[first_kv_head, listed, behind, reach, first_query]);
        pack(front, words)
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

/// The heads of new tokens, with their norms and rotation, as kernels read them.
#[derive(Clone, Copy, Default, Debug)]
pub struct NewHeadsArgs {
    /// `[queries, heads, split]`, `[queries, key heads, key_width]`, and `[queries, key heads, value_width]` or 0.
    pub rows: [u64; 3],
    /// `[queries, heads, rest_step]`, or 0.
    pub rest: u64,
    /// Of the norms of queries and keys, each for the values of a head that it is over, or for all heads; or 0.
    pub weights: [u64; 2],
    /// `[queries, dim / 2, 2]`: cosines and sines.
    pub cos_sin: u64,
    /// `[queries]`: factors on queries, or 0.
    pub scales: u64,
    /// Added under the root of the norms.
    pub eps: f64,
    /// Values of a query before those of the rest.
    pub split: u32,
    /// Values per head of the rest.
    pub rest_step: u32,
    /// The first value of the rest that belongs to the query.
    pub rest_first: u32,
    /// Values of a head that a norm is over; without effect if it is over all heads.
    pub norm_width: u32,
    /// The first rotated value of a head.
    pub first: u32,
    /// Rotated values of a head.
    pub dim: u32,
    /// Whether rotated pairs are adjacent.
    pub interleaved: bool,
    /// Whether a norm is over all heads of a token.
    pub whole: bool,
    /// Queries and keys after the norm, and values, are clamped to ± this.
    pub clip: Option<f32>,
    /// Whether the norm is over each head after its rotation.
    pub norm_last: bool,
    /// Factor on values.
    pub value_factor: f32,
    /// Whether each head of the values has a norm without weights.
    pub value_norm: bool,
}

impl NewHeadsArgs {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 120;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; NewHeadsArgs::BYTES] {
        let NewHeadsArgs { rows: [q, k, v], rest, weights: [of_q, of_k], cos_sin, scales, .. } = self;
        let NewHeadsArgs {
            eps, split, rest_step, rest_first, norm_width, first, dim, interleaved, whole, clip, ..
        } = self;
        let front = [q, k, v, rest, of_q, of_k, cos_sin, scales, eps.to_bits()];
        let flags = [interleaved, whole].map(u32::from);
        let (last, factor) = (u32::from(self.norm_last), self.value_factor.to_bits());
        let of_values = u32::from(self.value_norm);
        let limit = clip.unwrap_or(f32::INFINITY).to_bits();
        pack(
            front,
            [split, rest_step, rest_first, norm_width, first, dim, flags[0], flags[1], limit, last, factor, of_values],
        )
    }
}

/// Tasks of one launch, which differ in nothing but sequences: their arguments, and where these were written.
pub struct TaskList<'a> {
    /// The arguments, one after another with those of new heads behind each.
    pub tasks: &'a [AttentionKernelArgs],
    /// Address of the list.
    pub at: u64,
    /// Number formats of keys and values.
    pub kinds: [NumberFormat; 2],
}

impl TaskList<'_> {
    /// Bytes from one task to the next.
    pub const BYTES: usize = AttentionKernelArgs::BYTES + NewHeadsArgs::BYTES;

    /// The most of a number that a task has.
    fn most(&self, of: impl Fn(&AttentionKernelArgs) -> u32) -> u32 {
        self.tasks.iter().map(of).max().unwrap_or_default()
    }
}

impl Launches {
    /// Prepares the heads of new tokens for attention.
    pub fn new_heads(&self, list: &TaskList) -> Result<()> {
        let kernel = match list.kinds[0] {
            NumberFormat::F32 => "new_heads_f32",
            NumberFormat::Q8_0 => "new_heads_q8_0",
            _ => "new_heads_f16",
        };
        // Values have warps of their own also where they are parts of keys, which end at once.
        let warps = list.most(|args| args.count * (args.heads + 2 * args.heads / args.group));
        let grid = [warps.div_ceil(WARPS), list.tasks.len() as u32];
        self.launch(kernel, grid, 32 * WARPS, &[Argument::Address(list.at)])
    }

    /// Attention for some tiles.
    pub fn attend(&self, list: &TaskList, tiles: Range<u32>) -> Result<()> {
        let [keys, values] = list.kinds;
        let tasks = Argument::Word(list.tasks.len() as u32);
        let arguments = [Argument::Address(list.at), tasks, Argument::Word(tiles.start)];
        let count = tiles.len() as u32;
        let scores = match keys {
            NumberFormat::F32 => "scores_f32",
            NumberFormat::Q8_0 => "scores_q8_0",
            _ => "scores_f16",
        };
        let [weighted_sum, partial_sums] = match values {
            NumberFormat::F32 => ["weighted_sum_f32", "partial_sums_f32"],
            NumberFormat::Q8_0 => ["weighted_sum_q8_0", "partial_sums_q8_0"],
            _ => ["weighted_sum_f16", "partial_sums_f16"],
        };
        let (span, width) = (list.most(|args| args.score_stride), list.most(|args| args.value_width));
        // A few blocks more, which end at once, so that the launches are the same for many tokens.
        let blocks = span.div_ceil(ROW_GROUP as u32 * WARPS).next_multiple_of(SCORE_BLOCKS);
        self.launch(scores, [blocks, count], 32 * WARPS, &arguments)?;
        if list.tasks.iter().any(|args| args.bias != 0) {
            let blocks = span.div_ceil(THREADS).next_multiple_of(SCORE_BLOCKS);
            self.launch("add_bias", [blocks, count], THREADS, &arguments)?;
        }
        // A warp for each query, and a thread for each column.
        let threads = width.next_multiple_of(WARP).clamp(TILE_QUERIES as u32 * WARP, MAX_SUM_THREADS);
        if list.tasks.iter().all(|args| args.partial_sums == 0) {
            return self.launch(weighted_sum, [1, count], threads, &arguments);
        }
        let position_tiles = word(position_tiles(span as usize))?;
        self.launch(partial_sums, [position_tiles, count], threads, &arguments)?;
        let threads = width.next_multiple_of(WARP).min(MAX_SUM_THREADS);
        self.launch("add_partial_sums", [TILE_QUERIES as u32, count], threads, &arguments)
    }

    /// Attention of many queries in half precision. Keys and values are in one format.
    pub fn flash(&self, list: &TaskList) -> Result<()> {
        let kernel = match list.kinds[0] {
            NumberFormat::F32 => "flash_f32",
            NumberFormat::Q8_0 => "flash_q8_0",
            _ => "flash_f16",
        };
        let tiles =
            |args: &AttentionKernelArgs| (args.count * args.group).div_ceil(FLASH_PAIRS) * (args.heads / args.group);
        let warps = list.most(|args| tiles(args) * args.value_width.div_ceil(FLASH_COLUMNS));
        let grid = [warps.div_ceil(WARPS), list.tasks.len() as u32];
        self.launch(kernel, grid, 32 * WARPS, &[Argument::Address(list.at)])?;
        // The outputs of the tasks are next to each other.
        let values = list.tasks.iter().map(|args| args.count * args.heads * args.value_width).sum::<u32>();
        match list.tasks.first() {
            Some(AttentionKernelArgs { out, blocks, .. }) if *blocks != 0 => {
                self.quantise(*out, *blocks, values / BLOCK as u32)
            }
            _ => Ok(()),
        }
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
    fn kernels_have_the_same_tiles() {
        let kernels = include_str!("../../kernels/attention.cuh");
        assert!(kernels.contains(&format!("constexpr u32 TILE_POSITIONS = {TILE_POSITIONS};")));
        let arguments = include_str!("../../kernels/attention.cuh");
        assert!(arguments.contains(&format!("constexpr u32 TASK_BYTES = {};", TaskList::BYTES)));
        let flash = include_str!("../../kernels/flash.cu");
        assert!(flash.contains(&format!("constexpr u32 PAIRS = {FLASH_PAIRS};")));
        assert!(flash.contains(&format!("constexpr u32 COLUMNS = {FLASH_COLUMNS};")));
    }

    #[test]
    fn arguments_for_new_heads_are_written_as_kernels_read_them() {
        let args = NewHeadsArgs {
            rows: [1, 2, 3],
            rest: 4,
            weights: [5, 6],
            cos_sin: 7,
            scales: 8,
            eps: 0.5,
            split: 9,
            rest_step: 10,
            rest_first: 11,
            norm_width: 12,
            first: 13,
            dim: 14,
            interleaved: true,
            whole: true,
            clip: Some(1.0),
            norm_last: true,
            value_factor: 2.0,
            value_norm: true,
        };
        let words: Vec<u32> = args.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        assert_eq!(words[..16], (1..9).flat_map(|at| [at, 0]).collect::<Vec<u32>>());
        assert_eq!(
            words[16..],
            [0, 0x3FE0_0000, 9, 10, 11, 12, 13, 14, 1, 1, 0x3F80_0000, 1, 0x4000_0000, 1],
            "eps is a double"
        );
    }

    #[test]
    fn arguments_are_written_as_kernels_read_them() {
        let args = AttentionKernelArgs {
            queries: 1,
            key_pages: 2,
            value_pages: 3,
            seen: 4,
            sinks: 5,
            scores: 6,
            inverse_sums: 7,
            factors: 8,
            partial_sums: 9,
            out: 10,
            blocks: 11,
            chosen: 21,
            bias: 25,
            count: 12,
            heads: 13,
            group: 14,
            key_row_stride: 15,
            value_row_stride: 16,
            key_width: 17,
            value_width: 18,
            score_stride: 19,
            scale: 1.0,
            page_shift: 6,
            first_tile: 20,
            first_kv_head: 22,
            listed: 23,
            behind: 24,
            reach: 26,
            first_query: 27,
        };
        let words: Vec<u32> = args.to_bytes().as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b)).collect();
        let addresses: Vec<u32> = (1..12).chain([21, 25]).flat_map(|at| [at, 0]).collect();
        assert_eq!(words[..26], addresses);
        assert_eq!(words[26..], [12, 13, 14, 15, 16, 17, 18, 19, 1.0f32.to_bits(), 6, 20, 22, 23, 24, 26, 27]);
    }
}
