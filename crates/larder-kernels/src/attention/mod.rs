//! Softmax attention of queries over the KV cache.
//!
//! The positions that a query sees are taken in position tiles, which begin at multiples of [`TILE_POSITIONS`]. Within
//! a tile, scores are turned into powers, and the values are summed in the order of their positions, each weighted by
//! its power; then the tiles are added up in order (`softmax.rs`). So threads can share the positions of a long
//! context, and the result of a query depends only on the query and on the positions that it sees.
//!
//! Keys and values are rows of floats, so the SIMD kernels for float products and weighted sums do the work. All of
//! them give the same bits.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::AcqRel;

use crate::disjoint::Disjoint;
use crate::dispatch;
use crate::kernel_set::{KernelSet, MAX_TOKENS};
use crate::thread_pool::ThreadPool;

mod index;
mod kv_tensor;
mod query_tile;
mod row_products;
mod softmax;

pub use index::{IndexArgs, index_scores};
pub use kv_tensor::{AttentionArgs, AttentionTask, DistanceBias, KvPages, KvTensor};
use query_tile::{POWERS, QueryTile, common, scratch_bytes, tiles_of};
use softmax::Powers;

/// Positions of a position tile, the first of which is a multiple of this number. A part of the definition of
/// attention.
pub const TILE_POSITIONS: usize = 512;

/// Units of work per thread, so that other threads can take over the share of a thread that is delayed.
const UNITS_PER_THREAD: usize = 4;

/// The most queries of a query tile, which keys and values are read for together.
const TILE: usize = MAX_TOKENS;

/// The most queries of a query tile of which there are too few for all threads.
const SMALL_TILE: usize = 16;

/// Buffers of the thread that calls [`attend`], which grow as needed.
#[derive(Default)]
struct Shared {
    divisions: Vec<Division>,
    partial: Vec<f32>,
    /// For each query tile whose positions are divided, the parts that are not computed yet.
    left: Vec<AtomicUsize>,
}

thread_local! {
    static SHARED: RefCell<Shared> = RefCell::default();
}

/// Bytes of the buffers of attention on `threads` threads for queries that see up to `positions` positions, of keys and
/// values up to `width` wide; whatever the number of queries.
pub fn attention_scratch_bytes(positions: usize, width: usize, threads: usize) -> usize {
    let tiles = positions.div_ceil(TILE_POSITIONS).saturating_add(1);
    let partial =
        (UNITS_PER_THREAD * SMALL_TILE * size_of::<f32>()).saturating_mul(tiles).saturating_mul(width + POWERS);
    // Positions are shared only where there are fewer query tiles than units of work.
    let partial = if threads > 1 { partial } else { 0 };
    threads.saturating_mul(partial.saturating_add(scratch_bytes(width)))
}

/// Attention for a batch of sequences. Into `out [queries, heads, values.width]` of each: for each query and head the
/// sum of the values, weighted by the softmax of `scale · (query · key)`.
///
/// It is one fork-join: where threads share the positions of a query, the last of them adds up.
/// The result of a query depends neither on the rest of the batch, nor on the size of pages or the number of threads.
///
/// # Panics
/// If a length does not fit the shapes. They are checked here, once, and nowhere below.
pub fn attend(pool: &ThreadPool, tasks: &mut [AttentionTask]) {
    tasks.iter().for_each(AttentionTask::check);
    SHARED.with_borrow_mut(|Shared { divisions, partial, left }| {
        let units = if pool.threads() > 1 { UNITS_PER_THREAD * pool.threads() } else { 1 };
        let total = divide(tasks, units, divisions);
        partial.resize(partial.len().max(total.partial), 0.0);
        left.clear();
        for (task, division) in tasks.iter().zip(&*divisions).filter(|(_, division)| division.parts > 1) {
            let tiles = task.args.kv_heads * division.query_tiles;
            left.extend((0..tiles).map(|_| AtomicUsize::new(division.parts)));
        }
        let (tasks, partial) = (Tasks::new(tasks), Disjoint::new(partial));
        let shared = SharedTasks { set: dispatch::chosen(), tasks, divisions, partial, left };
        pool.run(total.units, &|unit| shared.compute(unit));
    });
}

/// How the work of a task is divided: into query tiles, and where there are few of them the positions into parts.
#[derive(Clone, Default)]
struct Division {
    /// The most queries of a query tile.
    tile: usize,
    /// Query tiles per key head.
    query_tiles: usize,
    /// Numbers of the position tiles that any query sees.
    position_tiles: Range<usize>,
    /// Parts that the position tiles are divided into. With more than one, the results of all tiles are stored, to be
    /// merged.
    parts: usize,
    /// Floats of the results of a query tile for a position tile.
    partial_len: usize,
    /// What the tasks before this one have.
    before: Totals,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    units: usize,
    /// Query tiles whose positions are divided.
    divided: usize,
    partial: usize,
}

/// Divides the work of all tasks into at least `wanted` units, if it is enough for that.
fn divide(tasks: &[AttentionTask], wanted: usize, divisions: &mut Vec<Division>) -> Totals {
    divisions.clear();
    let (mut query_tiles, mut all_tiles) = (0, 0);
    let tiles =
        |tile: usize| tasks.iter().map(|task| task.args.kv_heads * task.args.pairs().div_ceil(tile)).sum::<usize>();
    let tile = if tiles(TILE) >= wanted { TILE } else { SMALL_TILE };
    for AttentionTask { args, .. } in tasks {
        let pairs = args.pairs();
        let partial_len = tile.min(pairs) * (args.values.width + POWERS);
        let position_tiles = tiles_of(&args.visible().unwrap_or_default());
        let per_head = pairs.div_ceil(tile);
        query_tiles += args.kv_heads * per_head;
        all_tiles += args.kv_heads * per_head * position_tiles.len();
        divisions.push(Division {
            tile,
            query_tiles: per_head,
            position_tiles,
            parts: 1,
            partial_len,
            ..Division::default()
        });
    }
    let per_unit = if query_tiles < wanted { all_tiles / wanted } else { all_tiles }.max(1);
    let mut totals = Totals::default();
    for (task, division) in tasks.iter().zip(divisions) {
        let (tiles, positions) = (task.args.kv_heads * division.query_tiles, division.position_tiles.len());
        division.parts = positions.div_ceil(per_unit).max(1);
        division.before = totals;
        totals.units += tiles * division.parts;
        if division.parts > 1 {
            totals.divided += tiles;
            totals.partial += tiles * positions * division.partial_len;
        }
    }
    totals
}

impl AttentionTask<'_> {
    fn check(&self) {
        let AttentionTask { args, out } = self;
        let (queries, heads) = (args.seen.len(), args.heads);
        assert_eq!(args.queries.len(), queries * heads * args.keys.width, "queries do not fit the shape");
        assert_eq!(out.len(), queries * heads * args.values.width, "output does not fit the shape");
        assert!(
            args.kv_heads > 0 && heads.is_multiple_of(args.kv_heads),
            "the number of query heads must be a multiple of the number of key heads"
        );
        assert!(args.sinks.is_none_or(|s| s.len() == heads), "there must be one sink per head");
        let biased = |bias: &DistanceBias| bias.values.len() == heads * (2 * bias.reach + 1);
        assert!(args.bias.as_ref().is_none_or(biased), "the bias does not fit the heads");
        assert!(args.seen.iter().all(|seen| seen.start < seen.end), "a query must see at least one position");
        let Some(visible) = args.visible() else { return };
        args.keys.check(args.kv_heads, visible.clone());
        args.values.check(args.kv_heads, visible);
        assert_eq!(args.keys.row_bytes, args.keys.used_bytes(), "there must be no gaps between keys");
    }
}

/// The tasks as all threads see them: everything can be read, and outputs are written through [`Disjoint`].
struct Tasks<'a, 'b> {
    first: *mut AttentionTask<'a>,
    len: usize,
    tasks: PhantomData<&'b mut [AttentionTask<'a>]>,
}

// SAFETY: all shared parts are Sync, except the outputs, which are f32 and written in disjoint ranges.
unsafe impl Sync for Tasks<'_, '_> {}

impl<'a, 'b> Tasks<'a, 'b> {
    fn new(tasks: &'b mut [AttentionTask<'a>]) -> Self {
        Tasks { first: tasks.as_mut_ptr(), len: tasks.len(), tasks: PhantomData }
    }

    /// The arguments and the output of a task.
    fn get(&self, index: usize) -> (&AttentionArgs<'a>, Disjoint<'_, f32>) {
        assert!(index < self.len, "a task number beyond the batch");
        // SAFETY: inside the slice, which is borrowed while this value lives; there is no unique reference to it, and
        // none to the values of the output is created here.
        unsafe { (&(*self.first.add(index)).args, Disjoint::from_raw(&raw mut *(*self.first.add(index)).out)) }
    }
}

/// A batch that several threads work on.
struct SharedTasks<'a, 'b> {
    set: &'static KernelSet,
    tasks: Tasks<'a, 'b>,
    divisions: &'b [Division],
    /// For each divided task `[query tiles, position tiles, partial_len]`.
    partial: Disjoint<'b, f32>,
    left: &'b [AtomicUsize],
}

impl<'b> SharedTasks<'_, 'b> {
    /// The query tile number `number` of a task, counted over all key heads, and the output.
    fn query_tile(&self, task: usize, number: usize) -> (QueryTile<'_>, Disjoint<'_, f32>) {
        let (args, out) = self.tasks.get(task);
        let Division { tile, query_tiles, .. } = self.divisions[task];
        let (kv_head, first) = (number / query_tiles, number % query_tiles * tile);
        (QueryTile { args, set: self.set, kv_head, first, count: tile.min(args.pairs() - first) }, out)
    }

    /// Computes a unit: a query tile over all position tiles, or over a part of them.
    fn compute(&self, unit: usize) {
        let task = self.divisions.partition_point(|division| division.before.units <= unit) - 1;
        let division = &self.divisions[task];
        let unit = unit - division.before.units;
        let (number, part) = (unit / division.parts, unit % division.parts);
        let (tile, out) = self.query_tile(task, number);
        if division.parts == 1 {
            return tile.over_all_positions(&out);
        }
        let Range { start, end } = division.position_tiles;
        let share = |part: usize| start + (end - start) * part / division.parts;
        let visible = tile.visible();
        for at in common(&tiles_of(&visible), &(share(part)..share(part + 1))) {
            // SAFETY: every position tile of a query tile is in one unit.
            let partial = unsafe { self.partial_result(task, number, at) };
            tile.over_tile(at, &visible, partial);
        }
        if self.left[division.before.divided + number].fetch_sub(1, AcqRel) == 1 {
            self.merge(task, number);
        }
    }

    /// Adds up the position tiles of a query tile, all of which are computed.
    fn merge(&self, task: usize, number: usize) {
        let (tile, out) = self.query_tile(task, number);
        let width = tile.args.values.width;
        for i in 0..tile.count {
            // SAFETY: every pair of query and head is in one query tile, and their ranges of the output do not overlap.
            let (mut softmax, out) = unsafe { tile.begin(i, &out) };
            for at in tiles_of(&tile.seen(i)) {
                // SAFETY: only this unit uses the results of the query tile: all that stored them have counted down
                // before.
                let (values, powers) = unsafe { self.partial_result(task, number, at) }.split_at(tile.count * width);
                let powers = Powers { max: powers[POWERS * i], sum: powers[POWERS * i + 1] };
                softmax.add(powers, &values[i * width..][..width], out);
            }
            softmax.finish(out);
        }
    }

    /// The results of a query tile for a position tile: weighted sums, then powers.
    ///
    /// # Safety
    /// No two threads use the same at a time.
    unsafe fn partial_result(&self, task: usize, query_tile: usize, position_tile: usize) -> &'b mut [f32] {
        let Division { position_tiles, partial_len, before, .. } = &self.divisions[task];
        let index = query_tile * position_tiles.len() + position_tile - position_tiles.start;
        // SAFETY: as the caller guarantees.
        unsafe { self.partial.slice(before.partial + index * partial_len, *partial_len) }
    }
}

#[cfg(test)]
mod tests;
