//! The rows that queries of sparse attention see: their choice, and the tasks of attention to them.

use std::ops::Range;
use std::sync::Arc;

use larder_core::NumberFormat;
use larder_model::{
    BlockPooling, IndexBlocks, IndexChoice, KvPageShape, KvView, MAX_SCORE_BYTES, SeenRows, TILE_QUERIES,
};

use super::arrays::{table_bytes, write_pages};
use super::tiles::TaskTiles;
use super::{ALIGN, Args, GpuAttention, PlacedTask, STEP, State};
use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::launch_queue::LaunchQueue;
use crate::launches::{
    AttentionKernelArgs, BestOfBlocks, ChoiceOfRows, IndexTask, PoolTask, PooledBlocks, TaskList, word,
};
use crate::memory::DeviceBuffer;
use crate::new_tokens::NewTokens;

/// Memory for scores has room for a multiple of this many rows, so that launches are the same for many tokens.
const ROWS: usize = 1024;
/// The most lists that are made at once: the limit of CUDA for blocks in y.
const MAX_LISTS: usize = 65_535;

/// The last choice of rows.
pub struct Choice {
    /// `[count, stride]`: positions.
    lists: DeviceBuffer,
    scores: DeviceBuffer,
    stride: usize,
    count: usize,
}

impl Choice {
    pub fn new(driver: &Arc<dyn Driver>) -> Self {
        let [lists, scores] = [(); 2].map(|()| DeviceBuffer::new(driver));
        Choice { lists, scores, stride: 0, count: 0 }
    }

    /// Makes room for lists with at most `stride` positions each.
    fn begin(&mut self, count: usize, stride: usize) -> Result<()> {
        self.lists.ensure((4 * count * stride).next_multiple_of(STEP))?;
        (self.count, self.stride) = (count, stride);
        Ok(())
    }

    /// The address of a list.
    fn list(&self, number: usize) -> u64 {
        self.lists.at() + 4 * (number * self.stride) as u64
    }
}

/// Tokens on the device that see rows of their own.
pub(crate) struct ChosenTokens<'a> {
    /// Address of their queries, `[tokens, heads, key_width]`.
    pub queries: u64,
    /// `[tokens, parts]`: how many rows are chosen, or are the first of the view.
    pub counts: &'a [usize],
    /// Parts of the heads, each of which has a list of its own.
    pub parts: usize,
    /// Whether these are rows of the last choice.
    pub listed: bool,
    /// Whether tokens also see the rows of their tasks, behind those.
    pub and_seen: bool,
}

impl ChosenTokens<'_> {
    /// The numbers of the rows that the tokens of a task see, the first of which is the step's token `first`.
    pub fn seen(&self, args: &Args, first: usize) -> impl Iterator<Item = Range<usize>> {
        let (counts, more) = (self.counts[first * self.parts..].iter(), self.and_seen);
        let seen = args.seen.iter();
        let seen = seen.flat_map(move |seen| std::iter::repeat_n(if more { seen.len() } else { 0 }, self.parts));
        counts.zip(seen).map(|(count, more)| 0..count + more)
    }
}

/// An indexer's queries on the device.
pub(crate) struct IndexQueries {
    /// Address of the queries.
    pub queries: u64,
    /// Address of the weights, or 0.
    pub weights: u64,
}

impl GpuAttention {
    /// Begins a choice of rows.
    pub(crate) fn choose(&self, index: &IndexChoice, addresses: IndexQueries, rows: &[(KvView, usize)]) -> Result<()> {
        self.lock().choose(&self.queue, index, &addresses, rows)
    }

    /// Takes lists as the last choice.
    pub(crate) fn set_choice(&self, lists: &[&[u32]], most: usize) -> Result<()> {
        let mut state = self.lock();
        if lists.iter().any(|list| list.len() > most) {
            return Err(GpuError::Unsupported(format!("a list has more than {most} rows")));
        }
        state.choice.begin(lists.len(), most)?;
        let at = self.queue.stage_varying(4 * lists.len() * most, |_, bytes| {
            for (list, out) in lists.iter().zip(bytes.chunks_exact_mut(4 * most.max(1))) {
                out[..size_of_val(*list)].copy_from_slice(bytemuck::cast_slice(list));
            }
            Ok(())
        })?;
        state.launches.copy_bytes(at, state.choice.list(0), (4 * lists.len() * most).next_multiple_of(ALIGN) as u64)
    }

    /// Waits for the lists of the last choice, which have these lengths.
    pub(crate) fn choice(&self, counts: &[usize]) -> Result<Vec<Vec<u32>>> {
        let mut state = self.lock();
        let (at, stride) = (state.choice.list(0), state.choice.stride);
        if counts.len() != state.choice.count || counts.iter().any(|count| *count > stride) {
            return Err(no_such_choice(counts.len(), &state.choice));
        }
        let all: &[u32] = bytemuck::cast_slice(state.download.fetch(at, 4 * counts.len() * stride)?);
        let lists = all.chunks_exact(stride.max(1)).zip(counts);
        Ok(lists.map(|(list, count)| list[..*count].to_vec()).collect())
    }
}

impl GpuAttention {
    /// Begins norm and rotation of queries alone.
    pub(crate) fn rotate(&self, new: &NewTokens, [tokens, heads, width]: [usize; 3]) -> Result<()> {
        let state = self.lock();
        let kernel_args = AttentionKernelArgs {
            queries: new.queries,
            count: word(tokens)?,
            heads: word(heads)?,
            group: word(heads)?,
            key_width: word(width)?,
            ..AttentionKernelArgs::default()
        };
        let cos_sin = TaskList::BYTES.next_multiple_of(ALIGN);
        let at = self.queue.stage(cos_sin + new.bytes(tokens), |list, bytes| {
            bytes[..AttentionKernelArgs::BYTES].copy_from_slice(&kernel_args.to_bytes());
            let of_heads = new.args(0, tokens, list + cos_sin as u64).to_bytes();
            bytes[AttentionKernelArgs::BYTES..][..of_heads.len()].copy_from_slice(&of_heads);
            new.write(0, tokens, &mut bytes[cos_sin..]);
            Ok(())
        })?;
        state.launches.new_heads(&TaskList { tasks: &[kernel_args], at, kinds: [NumberFormat::F32; 2] })
    }

    /// Begins to pool rows of each sequence to blocks, into `out [blocks, width]`; `places` is an address or 0.
    pub(crate) fn pool(
        &self,
        rows: &[(KvView, Range<usize>)],
        (pooling, places): (&BlockPooling, u64),
        (out, [blocks, width]): (u64, [usize; 2]),
    ) -> Result<()> {
        let (state, BlockPooling { rate, overlap, .. }) = (self.lock(), *pooling);
        let no_fit = || GpuError::Unsupported(format!("{blocks} blocks of {rate} rows do not fit {rows:?}"));
        let shape = state.shape(rows.first().map(|(view, _)| view).ok_or_else(no_fit)?)?;
        let used = width * pooling.values_of_row();
        let (mut end, mut tables) = ((rows.len() * PoolTask::BYTES).next_multiple_of(ALIGN), Vec::new());
        for (view, own) in rows {
            let stored = view.first_page * shape.positions..(view.first_page + view.pages.len()) * shape.positions;
            let first = own.start.saturating_sub(overlap.into());
            let is_there = own.is_empty() || (stored.start <= first * rate && own.end * rate <= stored.end);
            if state.shape(view)? != shape
                || shape.heads != 1
                || !is_there
                || view.width != used
                || (overlap && places == 0)
                || used > shape.row_values()
            {
                return Err(no_fit());
            }
            tables.push(end);
            end = (end + table_bytes(view)).next_multiple_of(ALIGN);
        }
        let write = |at: u64, bytes: &mut [u8]| {
            let mut first = 0;
            for (number, ((view, own), table)) in rows.iter().zip(tables).enumerate() {
                let task = PoolTask {
                    pages: at + table as u64,
                    row_stride: word(shape.row_bytes)?,
                    first_block: word(own.start)?,
                    first_out: word(first)?,
                };
                bytes[number * PoolTask::BYTES..][..PoolTask::BYTES].copy_from_slice(&task.to_bytes());
                write_pages(view, &state.pages, bytes[table..].as_chunks_mut::<8>().0);
                first += own.len();
            }
            Ok(())
        };
        // The blocks of one sequence are complete at the same distances; how many sequences have complete ones varies.
        let tasks = match rows.len() {
            1 => self.queue.stage(end, write)?,
            _ => self.queue.stage_varying(end, write)?,
        };
        let (shape_of, kind, page_shift) = ([word(blocks)?, word(width)?], shape.kind, shape.positions.ilog2());
        let (task_count, rate) = (word(rows.len())?, word(rate)?);
        state.launches.pool_blocks(&PooledBlocks {
            tasks,
            task_count,
            places,
            out,
            shape: shape_of,
            rate,
            overlap,
            page_shift,
            kind,
        })
    }
}

impl State {
    /// Stages what the launches of a choice read, and launches them.
    fn choose(
        &mut self,
        queue: &LaunchQueue,
        index: &IndexChoice,
        addresses: &IndexQueries,
        rows: &[(KvView, usize)],
    ) -> Result<()> {
        let shape = self.check_index(index, rows)?;
        let (lists, stride) = (index.seen.len(), index.most());
        self.choice.begin(lists, stride)?;
        let most = index.seen.iter().map(|seen| seen.rows).max().unwrap_or(0).max(1).next_multiple_of(ROWS);
        let at_once = (MAX_SCORE_BYTES / (4 * most)).clamp(1, MAX_LISTS).min(lists);
        let most_blocks = match index.blocks {
            IndexBlocks::OfPositions(_) => 0,
            IndexBlocks::OfRows { rows, .. } => most.div_ceil(rows),
        };
        let score_bytes = (4 * at_once * most).next_multiple_of(ALIGN);
        self.choice.scores.ensure((score_bytes + 4 * at_once * most_blocks).next_multiple_of(STEP))?;
        let tasks = self.send_index(queue, index, addresses, rows, shape)?;
        for first in (0..lists).step_by(at_once) {
            self.launches.choose_rows(&ChoiceOfRows {
                tasks,
                task_count: word(rows.len())?,
                lists_from: [word(first)?, word(at_once.min(lists - first))?],
                scores: self.choice.scores.at(),
                stride: word(most)?,
                lists: self.choice.list(0),
                list_stride: word(stride)?,
                kind: shape.kind,
                heads: [word(index.heads)?, word(index.queries.width / (index.parts * index.heads))?],
                page_shift: shape.positions.ilog2(),
                scale: index.scale,
                rectified: index.rectified,
                wanted: word(index.count)?,
                block: word(index.block())?,
                of_rows: match index.blocks {
                    IndexBlocks::OfPositions(_) => None,
                    IndexBlocks::OfRows { local, .. } => {
                        let best = self.choice.scores.at() + score_bytes as u64;
                        Some(BestOfBlocks { best, stride: word(most_blocks)?, local: word(local.min(most_blocks))? })
                    }
                },
            })?;
        }
        Ok(())
    }

    /// Stages tasks, the rows and positions that each list sees, and page tables. Returns the address of the tasks.
    fn send_index(
        &self,
        queue: &LaunchQueue,
        index: &IndexChoice,
        addresses: &IndexQueries,
        rows: &[(KvView, usize)],
        shape: KvPageShape,
    ) -> Result<u64> {
        let (mut end, mut places, mut first) = ((rows.len() * IndexTask::BYTES).next_multiple_of(ALIGN), Vec::new(), 0);
        for (view, lists) in rows {
            let pages_at = (end + 8 * lists).next_multiple_of(ALIGN);
            places.push((end, pages_at, first));
            end = (pages_at + table_bytes(view)).next_multiple_of(ALIGN);
            first += lists;
        }
        queue.stage(end, |at, bytes| {
            for (number, ((view, lists), (seen_at, pages_at, first))) in rows.iter().zip(places).enumerate() {
                let of_lists = |of_all: u64, width: usize| of_all + 4 * (first * width) as u64;
                let task = IndexTask {
                    queries: of_lists(addresses.queries, index.queries.width / index.parts),
                    weights: if addresses.weights == 0 { 0 } else { of_lists(addresses.weights, index.heads) },
                    pages: at + pages_at as u64,
                    seen: at + seen_at as u64,
                    first: word(first)?,
                    row_stride: word(shape.row_bytes)?,
                };
                bytes[number * IndexTask::BYTES..][..IndexTask::BYTES].copy_from_slice(&task.to_bytes());
                let seen = index.seen[first..][..*lists].iter();
                for (SeenRows { rows, positions }, out) in seen.zip(bytes[seen_at..].as_chunks_mut::<8>().0) {
                    *out = bytemuck::cast([word(*rows)?, word(*positions)?]);
                }
                write_pages(view, &self.pages, bytes[pages_at..].as_chunks_mut::<8>().0);
            }
            Ok(())
        })
    }

    /// Checks the shapes of a choice, which the kernels rely on. Returns that of the pages.
    fn check_index(&self, index: &IndexChoice, rows: &[(KvView, usize)]) -> Result<KvPageShape> {
        let IndexChoice { queries, weights, parts, heads, count, seen, .. } = *index;
        let block = index.block();
        let no_fit = || GpuError::Unsupported(format!("a choice of {count} rows does not fit queries {queries:?}"));
        let stored = rows.iter().map(|(view, _)| view).find(|view| !view.pages.is_empty());
        let shape = self.shape(stored.ok_or_else(no_fit)?)?;
        let lists: usize = rows.iter().map(|(_, lists)| lists).sum();
        let ends_with_last = match index.blocks {
            IndexBlocks::OfPositions(_) => true,
            IndexBlocks::OfRows { local, .. } => (1..=count).contains(&local),
        };
        let is_whole = heads * parts > 0
            && ends_with_last
            && block > 0
            && queries.width.is_multiple_of(parts * heads)
            && [lists, queries.rows * parts] == [seen.len(); 2]
            && lists > 0
            && weights.is_none_or(|weights| [weights.rows, weights.width] == [queries.rows, parts * heads]);
        let mut rest = seen;
        for (view, lists) in rows {
            let own = rest.split_off(..*lists).ok_or_else(no_fit)?;
            let most = own.iter().map(|seen| seen.rows).max().unwrap_or(0);
            let has_rows = view.first_page == 0 && view.pages.len() * shape.positions >= most;
            let fits = (view.pages.is_empty() || self.shape(view)? == shape)
                && shape.heads == 1
                && view.width * heads * parts == queries.width;
            if !has_rows || !fits || view.width > shape.row_values() {
                return Err(no_fit());
            }
        }
        if is_whole && seen.iter().all(|seen| index.chosen(*seen) <= index.most()) { Ok(shape) } else { Err(no_fit()) }
    }

    /// Adds a task for each list of a sequence's tokens, the first of which is the step's token `first`.
    pub(super) fn place_chosen(
        &self,
        args: &Args,
        (sequence, first): (usize, usize),
        tokens: &ChosenTokens,
        kinds: [NumberFormat; 2],
        placed: &mut Vec<PlacedTask>,
    ) -> Result<()> {
        let ChosenTokens { counts, parts, listed, and_seen, .. } = *tokens;
        let lists = args.seen.len() * parts;
        let own = counts.get(first * parts..first * parts + lists).unwrap_or_default();
        let most = if listed { self.choice.stride } else { usize::MAX };
        // Rows of another source are before those of the task.
        let least_and_end = |seen: &Range<usize>| if and_seen { (0, seen.start) } else { (1, seen.end) };
        let fits = |(count, seen): (&usize, &Range<usize>)| {
            let (least, end) = least_and_end(seen);
            (least..=end.min(most)).contains(count)
        };
        let seen = args.seen.iter().flat_map(|seen| std::iter::repeat_n(seen, parts));
        let shape = [args.heads, args.kv_heads].map(|heads| (heads / parts.max(1)).max(1));
        if own.len() != lists
            || (listed && counts.len() != self.choice.count)
            || (and_seen && parts != 1)
            || !own.iter().zip(seen).all(fits)
            || !args.heads.is_multiple_of(parts)
            || !shape[0].is_multiple_of(shape[1])
        {
            return Err(no_such_choice(counts.len(), &self.choice));
        }
        let of_all = self.kernel_args(args, 0)?;
        let [heads, kv_heads] = shape;
        let group = heads / kv_heads;
        for (i, (count, numbers)) in own.iter().zip(tokens.seen(args, first)).enumerate() {
            let (query, part, list) = (i / parts, i % parts, first * parts + i);
            let behind = if and_seen { args.seen[query].start - count } else { 0 };
            let kernel_args = AttentionKernelArgs {
                count: 1,
                heads: word(heads)?,
                group: word(group)?,
                first_kv_head: word(part * args.kv_heads / parts)?,
                chosen: if listed { self.choice.list(list) } else { 0 },
                listed: word(*count)?,
                behind: word(behind)?,
                score_stride: word(numbers.len())?,
                ..of_all
            };
            let tiles = kv_heads * group.div_ceil(TILE_QUERIES);
            let tiles = TaskTiles { tiles, span: numbers.len(), width: args.values.width, kinds, flash: false };
            placed.push(PlacedTask { args: kernel_args, tiles, sequence, query, seen: i, first, head: part * heads });
        }
        Ok(())
    }
}

fn no_such_choice(lists: usize, choice: &Choice) -> GpuError {
    let Choice { count, stride, .. } = choice;
    GpuError::Unsupported(format!(
        "attention to {lists} lists does not fit: the last choice has {count} with up to {stride} rows"
    ))
}
