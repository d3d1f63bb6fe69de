//! Launches of the choice of rows: the scores of an indexer, and the highest of them.

use larder_core::{NumberFormat, ROW_GROUP};

use super::{Launches, THREADS, WARPS, pack};
use crate::driver::Argument;
use crate::error::Result;

/// Threads of a block that chooses among few rows, and among many.
const CHOOSING_THREADS: [u32; 2] = [256, 1024];
/// The least rows that are many.
const MANY_ROWS: u32 = 8192;

/// The queries of an indexer for tokens of one sequence, as kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct IndexTask {
    /// `[lists, heads, width]`
    pub queries: u64,
    /// `[lists, heads]`, or 0.
    pub weights: u64,
    /// Address of the table of the addresses of its pages.
    pub pages: u64,
    /// `[lists, 2]`: rows and positions.
    pub seen: u64,
    /// Number of its first list in the step.
    pub first: u32,
    /// Bytes from one row to the next.
    pub row_stride: u32,
}

impl IndexTask {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 40;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; IndexTask::BYTES] {
        pack([self.queries, self.weights, self.pages, self.seen], [self.first, self.row_stride])
    }
}

/// A choice for some lists of a step.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceOfRows {
    /// Address of the list of [`IndexTask`]s.
    pub tasks: u64,
    /// Number of tasks.
    pub task_count: u32,
    /// Number of the first list, and of those behind it that are made at once.
    pub lists_from: [u32; 2],
    /// `[lists at once, stride]`
    pub scores: u64,
    /// The most rows, or more.
    pub stride: u32,
    /// `[lists of the step, list_stride]`
    pub lists: u64,
    /// The most positions of a list.
    pub list_stride: u32,
    /// Number format of the rows.
    pub kind: NumberFormat,
    /// Heads of a query, and the width of each.
    pub heads: [u32; 2],
    /// The binary logarithm of the rows per page.
    pub page_shift: u32,
    /// Factor on the products.
    pub scale: f32,
    /// Whether products below 0 count as 0.
    pub rectified: bool,
    /// The most rows that are chosen.
    pub wanted: u32,
    /// Positions that a row stands for, or rows of a block.
    pub block: u32,
    /// Where blocks of rows are chosen.
    pub of_rows: Option<BestOfBlocks>,
}

/// The best scores of blocks of rows.
#[derive(Clone, Copy, Debug)]
pub struct BestOfBlocks {
    /// `[lists at once, stride]`
    pub best: u64,
    /// The most blocks, or more.
    pub stride: u32,
    /// The last blocks that come before all others.
    pub local: u32,
}

/// Rows of one sequence that are pooled to blocks, as kernels read them.
#[derive(Clone, Copy, Debug)]
pub struct PoolTask {
    /// Address of the table of the addresses of its pages.
    pub pages: u64,
    /// Bytes from one row to the next.
    pub row_stride: u32,
    /// Number of the first block.
    pub first_block: u32,
    /// Number of the first result.
    pub first_out: u32,
}

impl PoolTask {
    /// Size of the struct in kernels.
    pub const BYTES: usize = 24;

    /// The bytes of the struct in kernels.
    pub fn to_bytes(self) -> [u8; PoolTask::BYTES] {
        pack([self.pages], [self.row_stride, self.first_block, self.first_out])
    }
}

/// Blocks of rows that are pooled.
#[derive(Clone, Copy, Debug)]
pub struct PooledBlocks {
    /// Address of the list of [`PoolTask`]s.
    pub tasks: u64,
    /// Number of tasks.
    pub task_count: u32,
    /// `[rate, channels]`: added to logits; 0 for the mean.
    pub places: u64,
    /// `[blocks, width]`
    pub out: u64,
    /// Number of blocks, and the width of a result.
    pub shape: [u32; 2],
    /// Rows of a block.
    pub rate: u32,
    /// Whether the rows of the block before take part.
    pub overlap: bool,
    /// The binary logarithm of the rows per page.
    pub page_shift: u32,
    /// Number format of the rows.
    pub kind: NumberFormat,
}

impl Launches {
    /// Pools rows to blocks.
    pub fn pool_blocks(&self, pooled: &PooledBlocks) -> Result<()> {
        let PooledBlocks { tasks, task_count, places, out, shape: [blocks, width], .. } = *pooled;
        let PooledBlocks { rate, overlap, page_shift, kind, .. } = *pooled;
        let kernel = match kind {
            NumberFormat::F32 => "pool_blocks_f32",
            NumberFormat::Q8_0 => "pool_blocks_q8_0",
            _ => "pool_blocks_f16",
        };
        let [tasks, places, out] = [tasks, places, out].map(Argument::Address);
        let [task_count, blocks_of, width_of, rate, shift, overlap] =
            [task_count, blocks, width, rate, page_shift, overlap.into()].map(Argument::Word);
        let arguments = [tasks, task_count, places, out, blocks_of, width_of, rate, shift, overlap];
        self.launch(kernel, [(blocks * width).div_ceil(THREADS), 1], THREADS, &arguments)
    }

    /// Computes scores and chooses rows by them.
    pub fn choose_rows(&self, choice: &ChoiceOfRows) -> Result<()> {
        let ([first, count], [heads, width]) = (choice.lists_from, choice.heads);
        let [tasks, scores, lists] = [choice.tasks, choice.scores, choice.lists].map(Argument::Address);
        let [task_count, first, stride] = [choice.task_count, first, choice.stride].map(Argument::Word);
        let [heads, width, page_shift] = [heads, width, choice.page_shift].map(Argument::Word);
        let kernel = match choice.kind {
            NumberFormat::F32 => "index_scores_f32",
            NumberFormat::Q8_0 => "index_scores_q8_0",
            _ => "index_scores_f16",
        };
        let (scale, rectified) = (Argument::Float(choice.scale), Argument::Word(u32::from(choice.rectified)));
        let arguments = [tasks, task_count, first, scores, stride, heads, width, page_shift, scale, rectified];
        let grid = [choice.stride.div_ceil(ROW_GROUP as u32 * WARPS), count];
        self.launch(kernel, grid, 32 * WARPS, &arguments)?;
        let [list_stride, wanted, block] = [choice.list_stride, choice.wanted, choice.block].map(Argument::Word);
        let (mut scores_of, mut most, mut rows_each) = ([scores, stride], choice.stride, 1);
        if let Some(BestOfBlocks { best, stride: blocks, local }) = choice.of_rows {
            let best = [Argument::Address(best), Argument::Word(blocks)];
            let arguments = [tasks, task_count, first, scores, stride, best[0], best[1], block, Argument::Word(local)];
            self.launch("best_of_blocks", [blocks.div_ceil(WARPS), count], 32 * WARPS, &arguments)?;
            (scores_of, most, rows_each) = (best, blocks, choice.block);
        }
        let rows_each = Argument::Word(rows_each);
        let arguments =
            [tasks, task_count, first, scores_of[0], scores_of[1], lists, list_stride, wanted, block, rows_each];
        let threads = CHOOSING_THREADS[usize::from(most >= MANY_ROWS)];
        self.launch("choose_rows", [count, 1], threads, &arguments)
    }
}
